# HiQCache. `make` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CODEC ?= int8
LOCKS := requirements/cpu.lock requirements/cpu-nodeps.lock requirements/dev.lock

.PHONY: help env demo test lint clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 22

env: $(VENV)/.complete ## Make the Python environment (about 7 GB, 3 minutes)

$(VENV)/.complete: $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in ((3, 11), (3, 12)) or sys.exit("HiQCache needs Python 3.11 or 3.12; %s is %d.%d. Name another: make PYTHON=python3.11" % (sys.executable, *v))'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing SGLang for CPUs; torch and its libraries are large, this takes minutes ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	  $(addprefix -r ,$(LOCKS))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --editable .
	@touch $@

demo: env ## Real SGLang on this CPU: BF16 and INT8 side by side (CODEC=int8-rot: the other codec)
	$(BIN)/python -m loadtest.demo --codec $(CODEC)

test: env ## Run every test that needs no GPU and no Docker
	$(BIN)/python -m pytest

lint: env ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## Remove the environment, caches and prepared models
	rm -rf $(VENV) .cache build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
