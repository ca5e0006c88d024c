"""Many episodes: groups of episodes of a task, a limited number at a time."""
