"""HiQCache: SGLang's host KV tier (L2), kept as INT8 codes and scales."""

__version__ = "0.2.0"
