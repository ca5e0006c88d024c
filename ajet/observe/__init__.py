"""What a run shows and keeps: the experiment folder, progress, metrics, episodes, logs."""
