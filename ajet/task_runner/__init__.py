"""One episode, start to end: the workflow in its thread or process, the judge, deadlines, retries."""
