"""`ajet.debug`: what `--backbone=debug` runs."""

from __future__ import annotations

from ajet.config.section import Section
from ajet.config.types import Count, Port, Positive


class DebugConfig(Section):
    """`ajet.debug`: what `--backbone=debug` runs."""

    debug_max_parallel: Positive = 4
    """Episodes at the same time."""
    debug_first_n_tasks: Positive = 2
    """Run the first so many tasks."""
    debug_vllm_port: Port = 18000
    """Port of a vLLM server started for a debug run."""
    debug_vllm_seed: Count = 12345
    """Seed of a debug run's model."""
    debug_tensor_parallel_size: Positive = 1
    """GPUs that a debug run's vLLM engine is spread over."""
