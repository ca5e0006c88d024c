"""The embedded engine: continuous batching over any Hugging Face causal model, in this process.

From the outside in: `engine` (the `Engine` protocol and its thread), `scheduler` (who computes what in the next step),
`prefix_cache` and `kv` (what is already computed, and where it lies), `runner` (one forward pass), `attention`,
`sampler`.
"""
