"""Which four-bit codec: candidates as a few lines of torch, on real models, in fp32."""
