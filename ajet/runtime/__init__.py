"""The composition root: builds everything that episodes and conversations need in one process, from a config."""
