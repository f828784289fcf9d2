"""`hiqcache canary`: what a quantised L2 costs in quality, measured on the live server.

A small process beside the server, off the scheduler's way. For each of a few prompts of its own:

1. **Fill.** The prompt's prefix is computed, under a cache key that nobody else's requests have.
2. **Reference.** The prompt is scored with its prefix still in L1, as it was computed.
3. **Wait**, until the server's own load has pushed the prefix out of L1. Nothing is flushed.
4. **Restored.** The prompt is scored again. The cache report proves that the whole prefix came from
   L2; the two log-probabilities are compared (`divergence`), and 3 follows again, with the same
   reference: what lies in L2 is still the copy that was made of step 1's rows.

The same tokens are computed after the same prefix in both askings, so they run in the same shapes,
and a copy (BF16) must read exactly zero. Another request's prefill in the same batch changes
shapes: every asking is therefore repeated until it gives the same bits twice, and counts as
`unsteady` where it does not. What is left of a difference is the restore's.

What it costs. L2 holds the prompts (a few hundred tokens each), and no more of them than a stated
share of its tokens, 1 % unless told otherwise (`budget`). The server computes each prompt once, and
afterwards the few scored tokens of each asking, one asking a minute or as told. A server without
load evicts nothing; only where the operator allows tokens for it, and a share of L2 for them, the
canary pushes with prompts of its own (`push`).
"""
