"""Writes a model folder of random weights, for a shape whose trained weights cannot be had.

SGLang's --load-format dummy fills weights with values so small that every prompt gets the same
answer, which would hide a wrong KV row. Here each matrix is drawn as the architecture's own
initialisation draws it, so that answers depend on every token.

    python -m bench.lab.random_model CONFIG_DIR OUT [--set head_dim=128 ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any


def write(shape: Path, out: Path, seed: int = 0, **changed: Any) -> Path:
    """A bf16 model of ``shape``'s config.json in ``out``, with its tokenizer's files.

    changed: values of that config.json that are others here.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    shutil.copytree(shape, out, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    stated = json.dumps({**json.loads((shape / "config.json").read_text()), **changed}, indent=2)
    (out / "config.json").write_text(stated)
    config = AutoConfig.from_pretrained(out)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    # As it was stated, without what this release of transformers adds.
    (out / "config.json").write_text(stated)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lab.random_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shape", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="values of config.json (JSON) that are others here",
    )
    arguments = parser.parse_args()
    pairs = (pair.partition("=") for pair in arguments.set)
    changed = {key: json.loads(value) for key, _, value in pairs}
    print(write(arguments.shape, arguments.out, **changed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
