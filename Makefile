# HiQCache. `make` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HIQCACHE_CODEC ?= int8
# grafana-client overwrites urllib3: it gets an environment of its own.
GRAFANA_VENV := .cache/grafana
# Another release of SGLang (SGLANG=0.5.22) lies over the environment: its own packages come first.
DEFAULT_SGLANG := $(patsubst sglang==%,%,$(filter sglang==%,$(file <requirements/cpu-nodeps.in)))
OVERLAY := $(if $(filter-out $(DEFAULT_SGLANG),$(SGLANG)),.cache/sglang-$(SGLANG))
RUN := $(or $(OVERLAY),$(VENV))/bin/python
# What is run on every served release; docs/compatibility.md says what passed.
RELEASE_TESTS := tests/sglang tests/e2e/test_restores.py tests/e2e/test_l3.py
LOCKS := requirements/cpu.lock requirements/cpu-nodeps.lock requirements/dev.lock
COMPOSE := docker compose --env-file .env $(if $(wildcard local.env),--env-file local.env)

.PHONY: help env demo demo-results test lint quality bench up down logs images dashboards \
  dashboards-preview monitoring-test storage-test fleet-test compose-test wheel contract releases release clean

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

# What runs on CPUs must not find a GPU that its environment has no kernels for.
demo demo-results test monitoring-test storage-test fleet-test dashboards-preview: export CUDA_VISIBLE_DEVICES :=

demo: env $(OVERLAY) ## Real SGLang on this CPU: BF16 and INT8 side by side (HIQCACHE_CODEC=int8-rot: another codec)
	$(RUN) -m bench.demo --codec $(HIQCACHE_CODEC)

demo-results: env ## Renew the demo's figures that the documentation quotes (results/demo)
	$(BIN)/python -m bench.demo --out results/demo
	$(BIN)/python -m bench.readme

# Servers in one worker, all else in the other: more servers at once would want more memory.
test: env $(or $(OVERLAY),$(GRAFANA_VENV)/.complete) ## Every test that needs no GPU, no Docker and no Prometheus (SGLANG=x.y.z: what is run on every served release)
	$(RUN) -m pytest -n 2 --dist loadgroup -m "not docker and not monitoring and not storage" $(if $(SGLANG),$(RELEASE_TESTS))

releases: env ## Renew what docs/compatibility.md says of the served releases of SGLang (results/releases)
	@for release in $$($(BIN)/python -c 'from hiqcache.sglang.adapters import SERVED; print(*SERVED)'); do \
	  $(MAKE) --no-print-directory release SGLANG=$$release || exit 1; done
	$(BIN)/python -m docs.compatibility

release: needs-storage-test env $(OVERLAY)
	$(RUN) -m pytest -n 2 --dist loadgroup --junitxml .cache/release-$(SGLANG).xml $(RELEASE_TESTS)
	$(RUN) -m docs.releases .cache/release-$(SGLANG).xml

.cache/sglang-%: requirements/sglang-%.lock | env
	rm -rf $@
	$(BIN)/python -m venv --without-pip $@
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	  > $$($@/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth
	$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	  -r $< || { rm -rf $@; exit 1; }
	@touch $@

storage-test: needs-storage-test env ## Encoded pages in a real Mooncake store, and a fleet that shares a folder of them, on a CPU
	$(BIN)/python -m pytest -m "storage and not mooncake_fleet"

fleet-test: needs-storage-test env ## That fleet on a folder and on a Mooncake store
	$(BIN)/python -m pytest tests/e2e/test_fleet.py

# The Python that SGLang serves with: the machine's own where it has SGLang, as on a GPU host.
SGLANG_PYTHON ?= $(shell $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("sglang"))' 2>/dev/null && echo $(PYTHON))
# Asked once, not at each use.
SGLANG_PYTHON := $(SGLANG_PYTHON)

quality: $(if $(SGLANG_PYTHON),,env) ## What restored prefixes cost in quality (TASKS=mmlu,gsm8k: right answers; MODEL=DIR)
	$(or $(SGLANG_PYTHON),$(BIN)/python) -m bench.quality$(if $(TASKS),.tasks --tasks $(TASKS)) $(if $(MODEL),--model $(MODEL)) \
	  $(if $(PAGE_SIZE),--page-size $(PAGE_SIZE)) $(if $(TP_SIZE),--tp-size $(TP_SIZE))

bench: $(if $(SGLANG_PYTHON),,env) ## Both arms on this machine's GPU, or its CPU (MODEL=DIR HICACHE_GB=8 PAGE_SIZE=64 TP_SIZE=1 REPEATS=4 ARMS=... EXPERIMENTS=... OUT=DIR PLAN=1)
	$(if $(GRAFANA_TOKEN),-@$(MAKE) --no-print-directory $(GRAFANA_VENV)/.complete)
	$(if $(GRAFANA_TOKEN),GRAFANA_PYTHON=$(abspath $(GRAFANA_VENV))/bin/python) \
	  $(or $(SGLANG_PYTHON),$(BIN)/python) -m bench.tiers $(if $(PLAN),--plan)

$(GRAFANA_VENV)/.complete: requirements/grafana.lock
	$(PYTHON) -m venv $(GRAFANA_VENV)
	$(GRAFANA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --require-hashes -r requirements/grafana.lock
	@touch $@

up: ## Start the stack and wait until it is healthy (docker/README.md)
	$(COMPOSE) up -d --build --wait

down: ## Stop the stack
	$(COMPOSE) down

logs: ## Follow the stack's logs
	$(COMPOSE) logs -f

images: ## Build every image
	$(COMPOSE) --profile cpu --profile gpu --profile fleet build

dashboards: env ## Generate the dashboards' JSON from their code
	$(BIN)/python -m monitoring.dashboards

monitoring/node_modules: monitoring/package-lock.json
	cd monitoring && npm ci --no-audit --no-fund
	@touch $@

# Before anything is built: what the machine lacks, and the command that installs it.
needs-%:
	@$(PYTHON) -m tests.needs $*

dashboards-preview: needs-dashboards-preview env monitoring/node_modules ## Draw each dashboard from a live Prometheus
	$(BIN)/python -m monitoring.preview

monitoring-test: needs-monitoring-test env monitoring/node_modules ## Servers, Prometheus, load: every panel and rule
	$(BIN)/python -m pytest -m monitoring tests/monitoring

compose-test: needs-compose-test env ## Build the images and run the stack in a real Docker engine
	$(BIN)/python -m pytest -m docker -s tests/deploy

lint: env ## Style, types, containers and generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint -c docker/hadolint.yaml docker/*.Dockerfile
	$(BIN)/yamllint -s -c docker/yamllint.yaml compose.yaml monitoring/*.yml monitoring/rules \
	  monitoring/grafana
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(BIN)/python -m monitoring.dashboards --check
	$(BIN)/python -m bench.readme --check
	$(BIN)/python -m docs.compatibility --check

wheel: env ## Build the package into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir dist .

contract: env ## Do the served releases of SGLang keep what HiQCache needs of them? (SGLANG=x.y.z: another; reads wheels)
	@versions="$${SGLANG:-$$($(BIN)/python -c 'from hiqcache.sglang.adapters import SERVED; print(*SERVED)')}" && \
	  for version in $$versions; do $(BIN)/python -m pip download --quiet \
	    --disable-pip-version-check --no-deps --only-binary :all: --dest .cache/wheels \
	    sglang==$$version || exit 1; done && \
	  $(BIN)/python -m hiqcache.sglang.release \
	    $$(for version in $$versions; do echo .cache/wheels/sglang-$$version-*.whl; done)

clean: ## Remove the environment, caches and prepared models
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
