"""One attempt at an episode, start to end: deadline, user code in a thread or process, judge, `Episode`."""
