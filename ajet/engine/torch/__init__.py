"""The embedded engine: continuous batching over any Hugging Face causal model, in this process.

From the outside in: `engine` (the `Engine` and the messages to its thread), `worker` (the thread), `scheduler` (who
computes what in the next step), `kv_cache` (what is computed already, and where it is stored), `runner` (one forward
pass), `attention`, `sampler`.
"""
