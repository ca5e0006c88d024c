"""`ajet.task_judge`: how a workflow's output becomes a reward, where the workflow gives none."""

from __future__ import annotations

from typing import Literal

from ajet.config.section import Block, Section
from ajet.config.types import Count, Positive, Real


class RubricsConfig(Section):
    """`ajet.task_judge.rubrics_auto_grader`: a model judges by rubrics. Loads; not part of this version."""

    model_name: str = ""
    """The judging model."""
    grader_mode: Literal["pointwise", "listwise"] = "pointwise"
    """One answer at a time, or answers against each other."""
    language: str = "en"
    """Language of the rubrics."""
    query_specific_generate_number: Positive = 1
    """Rubrics a task."""
    enable_categorization: bool = False
    """Group the rubrics."""
    categories_number: Positive = 5
    """Groups of rubrics."""
    grader_name: str = ""
    """The grader's name."""
    query_field: str = "main_query"
    """Field that holds the problem."""
    answer_field: str = "final_answer"
    """Field that holds the answer."""
    reference_field: str = "answer"
    """Field that holds the reference answer."""
    custom_evaluation_prompt: str | Block | None = None
    """Your own prompt for the judging model."""
    input_data_type: str = "jsonl_dataset_file"
    """A reader, as in `task_reader.type`."""
    jsonl_dataset_file: Block = Block()
    """As in `task_reader.jsonl_dataset_file`."""
    dataset_file: Block = Block()
    """Former name of `jsonl_dataset_file`."""
    min_score: Real = 0
    """Lowest score."""
    max_score: Real = 1
    """Highest score."""
    success_threshold: Real = 0.7
    """Score from which an episode is a success."""
    sampling_mode: str = "all_samples"
    """How examples are chosen."""
    generate_number: Positive = 1
    """Rubrics to make."""
    max_epochs: Positive = 3
    """Rounds of refining."""
    max_retries: Count = 3
    """Retries of a failed request."""
    aggregation_mode: str = "keep_all"
    """How rubrics are joined."""
    num_reference_samples: Count = 20
    """Examples to make rubrics from."""


class TaskJudgeConfig(Section):
    """`ajet.task_judge`: how a workflow's output becomes a reward, where the workflow gives none."""

    judge_type: Literal["customized_protocol", "rubrics_auto_grader"] = "customized_protocol"
    """`customized_protocol`: the class named by `judge_protocol`."""
    judge_protocol: str | None = None
    """Your judge: `module.path->Class` or `path/file.py->Class`. Needed only if workflows return no reward."""
    success_threshold: Real = 1.0
    """Reward from which an episode counts as a success, where neither workflow nor judge says."""
    alien_llm_model: str = ""
    """A helper model for judges that ask one."""
    alien_llm_response_length: Positive = 512
    """Tokens of the helper's answer."""
    rubrics_auto_grader: RubricsConfig = RubricsConfig()
    """A model judges by rubrics. Loads; not part of this version."""
