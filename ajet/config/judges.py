"""The judges of ours that `ajet.task_judge` can name: a model that grades, rubrics, graders of py-openjudge, parts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ajet.config.section import AboveZero, Block, Count, Positive, Real, Section, Temperature

PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
GraderMode = Literal["pointwise", "listwise"]


class LlmJudgeConfig(Section):
    """`ajet.task_judge.llm_judge`: a model grades answers by your prompt."""

    model: str | None = None
    """The grading model, at `ajet.helper`'s endpoint. null: `ajet.helper.model`."""
    mode: GraderMode = "pointwise"
    """`pointwise`: each answer gets a score. `listwise`: the answers of a group are ranked."""
    prompt: str | None = None
    """What the model is asked, with `{query}`, `{answer}` (`{answers}` with `listwise`), `{reference}`,
    `{conversation}`, `{environment}`, `{task.KEY}` and `{output.KEY}` filled in. null: a prompt of ours."""
    prompt_file: str | None = None
    """A file that holds the prompt."""
    system_prompt: str | None = None
    """A system message before the prompt."""
    answer_field: str = "final_answer"
    """Field of the output's metadata with the answer; without it, the last reply is judged."""
    reference_field: str = "answer"
    """Field of the task's metadata with the reference answer."""
    min_score: Real = 0
    """Lowest score."""
    max_score: Real = 10
    """Highest score."""
    normalise: bool = True
    """Scale the score to 0 … 1."""
    success_threshold: Real = 0.7
    """Reward from which an episode is a success."""
    votes: Positive = 1
    """How often each answer is graded."""
    combine: Literal["mean", "median"] = "mean"
    """What becomes of several votes."""
    swap_order: bool = True
    """With `listwise`: ask each vote in both orders, so that no place is preferred."""
    temperature: Temperature | None = None
    """Temperature. null: 0 with one vote, 0.7 with several."""
    max_tokens: Positive = 1024
    """Most tokens per answer of the grading model."""
    max_concurrent: Positive = 32
    """Most questions at a time, per process."""
    retries: Count = 3
    """How often an unusable answer is asked for again; after that it is a `judge_error`."""
    cache: bool = True
    """Keep answers in the experiment folder, and ask the same question once."""


class ExamplesConfig(Section):
    """`ajet.task_judge.rubrics_auto_grader.….training`: a file of graded examples."""

    file_path: str | None = None
    """A JSON Lines file: per line one graded answer, or a set of ranked answers with `listwise`."""


class ExampleFilesConfig(Section):
    """`ajet.task_judge.rubrics_auto_grader.jsonl_dataset_file`: graded examples."""

    training: ExamplesConfig = ExamplesConfig()
    """The examples that rubrics are written from."""
    validation: ExamplesConfig = ExamplesConfig()
    """Examples that the finished rubrics are tried on. None: those that they were written from."""


class RubricsConfig(Section):
    """`ajet.task_judge.rubrics_auto_grader`: a model grades by rubrics that it wrote from graded examples."""

    model_name: str = ""
    """The model that writes rubrics and grades, at `ajet.helper`'s endpoint. Empty: `ajet.helper.model`."""
    grader_mode: GraderMode = "pointwise"
    """One answer at a time, or the answers of a group against each other."""
    language: str = "en"
    """Language of the rubrics."""
    rubrics_file: str | None = None
    """Your rubrics, as YAML. null: `cache/rubrics.yaml` in the experiment folder, written if missing."""
    query_specific_generate_number: Positive = 1
    """Rubrics that are proposed from one example."""
    enable_categorization: bool = False
    """Sum up all rubrics as `categories_number` themes."""
    categories_number: Positive = 5
    """Themes of rubrics."""
    max_total_rubrics: Positive = 200
    """Most rubrics to keep."""
    grader_name: str = "rubrics"
    """A name for the grader, in the viewer."""
    query_field: str = "main_query"
    """Field of an example that holds the problem."""
    answer_field: str = "final_answer"
    """Field of an example (there also `answer`), and of the output's metadata, with the answer."""
    reference_field: str = "answer"
    """Field of the task's metadata with the reference answer, for your prompts."""
    custom_evaluation_prompt: str | Block | None = None
    """Your grading prompt, or prompts by language, with `{rubrics}` and the placeholders of `llm_judge.prompt`."""
    jsonl_dataset_file: ExampleFilesConfig = ExampleFilesConfig()
    num_reference_samples: Count = 20
    """Most examples that rubrics are written from; 0: all."""
    sampling_mode: Literal["all_samples", "smart_sampling"] = "all_samples"
    """`smart_sampling`: leave out rubrics that say nothing new, and stop once few do."""
    generate_number: Positive = 1
    """How often all examples are gone through."""
    max_epochs: Positive = 3
    """With one example: how often its rubrics are revised until they agree with its grade."""
    aggregation_mode: Literal["keep_all", "merge_similar"] = "keep_all"
    """`merge_similar`: leave out rubrics that nearly repeat another."""
    min_score: Real = 0
    """Lowest score. With `listwise`, the reward of the last place."""
    max_score: Real = 1
    """Highest score. With `listwise`, the reward of the first place."""
    success_threshold: Real = 0.7
    """Score from which an episode is a success."""
    votes: Positive = 1
    """How often each answer is graded; the mean counts."""
    swap_order: bool = True
    """With `listwise`: ask each vote in both orders, so that no place is preferred."""
    temperature: Temperature | None = None
    """Temperature. null: 0 with one vote, 0.7 with several."""
    max_tokens: Positive = 2048
    """Most tokens per answer of the model."""
    max_concurrent: Positive = 32
    """Most questions at a time, per process."""
    max_retries: Count = 3
    """How often an unusable answer is asked for again; after that it is a `judge_error`."""
    cache: bool = True
    """Keep gradings in the experiment folder, and ask the same question once."""


class OpenJudgeConfig(Section):
    """`ajet.task_judge.openjudge`: a grader of the package py-openjudge, in a process of its own."""

    grader: str = ""
    """A class of `openjudge.graders`, such as `StringMatchGrader`, or `module->Class`."""
    python: str | None = None
    """The Python interpreter that has py-openjudge. null: ajet's own."""
    options: Block = Block()
    """What the grader's class is built with, such as `{algorithm: exact_match}`."""
    inputs: dict[str, str] = {}
    """What the grader is given, by parameter, with the placeholders of `llm_judge.prompt`. By default `query`,
    `response` and `reference_response` are `{query}`, `{answer}` and `{reference}`."""
    model: str | None = None
    """The model that a grader asks, at `ajet.helper`'s endpoint. null: `ajet.helper.model`, if it needs one."""
    answer_field: str = "final_answer"
    """Field of the output's metadata with the answer; without it, the last reply is judged."""
    reference_field: str = "answer"
    """Field of the task's metadata with the reference answer."""
    min_score: Real = 0
    """Lowest score that the grader gives."""
    max_score: Real = 1
    """Highest score that it gives. A score outside is a `judge_error`."""
    normalise: bool = True
    """Scale the score to 0 … 1."""
    success_threshold: Real = 0.7
    """Reward from which an episode is a success."""
    max_concurrent: Positive = 32
    """Most answers that are graded at a time, per process."""
    timeout: AboveZero = 120
    """Seconds for one grade. After that it is a `judge_error`."""


class JudgePartConfig(Section):
    """`ajet.task_judge.parts.<name>`: one part of a composite reward."""

    judge: str = ""
    """`llm_judge`, `rubrics_auto_grader`, `openjudge`, `tests`, or a class: `module.path->Class` or
    `path/file.py->Class`."""
    weight: Real = 1.0
    """Its weight in the sum."""
    llm_judge: LlmJudgeConfig | None = None
    """For this part, in place of `task_judge.llm_judge`."""
    rubrics_auto_grader: RubricsConfig | None = None
    """For this part, in place of `task_judge.rubrics_auto_grader`."""
    openjudge: OpenJudgeConfig | None = None
    """For this part, in place of `task_judge.openjudge`."""
