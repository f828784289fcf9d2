"""What each client sends: shared prefixes that together take more than L1, so that L2 is read."""

GROUPS, PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 6, 256, 24, 16
