"""The embedded trainer: packs a batch's call trees, computes their loss, updates the weights."""
