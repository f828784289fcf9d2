"""Writes a model folder of random weights, for a shape whose trained weights cannot be had.

SGLang's --load-format dummy fills weights with values so small that every prompt gets the same
answer, which would hide a wrong KV row. Here each matrix is drawn as the architecture's own
initialisation draws it, so that answers depend on every token.

    python -m bench.lab.random_model CONFIG_DIR OUT
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path


def write(shape: Path, out: Path, seed: int = 0) -> Path:
    """A bf16 model of ``shape``'s config.json in ``out``, with its tokenizer's files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    for file in shape.iterdir():
        shutil.copy(file, out / file.name)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lab.random_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shape", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(write(arguments.shape, arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
