"""The rollout store: a queue of rollouts, and the records of their attempts, spans and resources."""
