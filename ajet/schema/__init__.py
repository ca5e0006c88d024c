"""Pure data that every part shares. Imports nothing of ours, and nothing heavy."""

__version__ = "0.1.0"
