"""The composition root: builds everything that episodes need in one process, from a config."""
