"""Confined places in which episodes run commands: see `sandbox`."""
