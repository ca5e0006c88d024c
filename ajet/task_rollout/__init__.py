"""Many episodes: groups of attempts at a task, so many at once."""
