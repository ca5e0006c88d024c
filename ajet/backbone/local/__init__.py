"""The embedded backbone: rollout, credit and update on one machine, with PyTorch alone."""
