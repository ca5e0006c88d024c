"""The `tiny:` models: small, deterministic, built offline. For tests, for teaching, and for trying a workflow."""
