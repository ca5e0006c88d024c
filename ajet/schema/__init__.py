"""Pure data that every part shares. Imports nothing of ours, and nothing heavy."""
