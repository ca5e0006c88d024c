"""The `tiny:` models: small, deterministic, built offline. For tests, for teaching, and to try a workflow."""
