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
    """The grading model, at the endpoint of `ajet.helper`. null: `ajet.helper.model`."""
    mode: GraderMode = "pointwise"
    """`pointwise`: each answer gets a score. `listwise`: the answers of a group are ranked against each other."""
    prompt: str | None = None
    """What the model is asked. `{query}`, `{answer}` (`{answers}` with `listwise`), `{reference}`, `{conversation}`,
    `{environment}`, `{task.KEY}` and `{output.KEY}` are filled in. null: a prompt of ours."""
    prompt_file: str | None = None
    """A file that holds the prompt."""
    system_prompt: str | None = None
    """A system message before the prompt."""
    answer_field: str = "final_answer"
    """Field of the output's metadata that holds the answer. An output without it is judged by its last reply."""
    reference_field: str = "answer"
    """Field of the task's metadata that holds the reference answer."""
    min_score: Real = 0
    """Lowest score."""
    max_score: Real = 10
    """Highest score."""
    normalise: bool = True
    """The reward is the score scaled to 0 … 1. False: the score itself."""
    success_threshold: Real = 0.7
    """Reward from which an episode is a success."""
    votes: Positive = 1
    """How often each answer is graded."""
    combine: Literal["mean", "median"] = "mean"
    """What becomes of several votes."""
    swap_order: bool = True
    """With `listwise`: ask each vote in both orders of the answers, so that no place is preferred."""
    temperature: Temperature | None = None
    """Temperature of the grading model. null: 0 with one vote, 0.7 with several."""
    max_tokens: Positive = 1024
    """Most tokens per answer of the grading model."""
    max_concurrent: Positive = 32
    """Most questions at a time, per process."""
    retries: Count = 3
    """How often an answer that can't be used is asked for again. After that it is a `judge_error`, never a score."""
    cache: bool = True
    """Keep answers in the experiment folder: the same question is asked once."""


class ExamplesConfig(Section):
    """`ajet.task_judge.rubrics_auto_grader.….training`: a file of graded examples."""

    file_path: str | None = None
    """A JSON Lines file: one graded answer (or, with `listwise`, one set of ranked answers) per line."""


class ExampleFilesConfig(Section):
    """`ajet.task_judge.rubrics_auto_grader.jsonl_dataset_file`: graded examples."""

    training: ExamplesConfig = ExamplesConfig()
    """The examples that rubrics are written from."""
    validation: ExamplesConfig = ExamplesConfig()
    """Examples that the finished rubrics are tried on. None: those that they were written from."""


class RubricsConfig(Section):
    """`ajet.task_judge.rubrics_auto_grader`: a model grades by rubrics that it wrote from graded examples."""

    model_name: str = ""
    """The model that writes the rubrics and grades, at the endpoint of `ajet.helper`. Empty: `ajet.helper.model`."""
    grader_mode: GraderMode = "pointwise"
    """One answer at a time, or the answers of a group against each other."""
    language: str = "en"
    """Language of the rubrics."""
    rubrics_file: str | None = None
    """A YAML file with rubrics of yours. null: `cache/rubrics.yaml` in the experiment folder, written if it isn't
    there."""
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
    """Field of an example, and of an output's metadata, that holds the answer; an example may also call it `answer`."""
    reference_field: str = "answer"
    """Field of the task's metadata that holds the reference answer, for prompts of yours."""
    custom_evaluation_prompt: str | Block | None = None
    """Your own prompt for grading: `{rubrics}` and the placeholders of `llm_judge.prompt` are filled in. With languages
    as keys, that of `language`."""
    jsonl_dataset_file: ExampleFilesConfig = ExampleFilesConfig()
    """Graded examples."""
    num_reference_samples: Count = 20
    """Most examples that rubrics are written from; 0: all."""
    sampling_mode: Literal["all_samples", "smart_sampling"] = "all_samples"
    """`smart_sampling`: rubrics that say nothing new are left out, and writing stops once they no longer add much."""
    generate_number: Positive = 1
    """How often all examples are gone through."""
    max_epochs: Positive = 3
    """With one example: how often its rubrics are revised, until grading by them agrees with its grade."""
    aggregation_mode: Literal["keep_all", "merge_similar"] = "keep_all"
    """`merge_similar`: rubrics that nearly repeat another one are left out."""
    min_score: Real = 0
    """Lowest score. With `listwise`, the reward of the last place."""
    max_score: Real = 1
    """Highest score. With `listwise`, the reward of the first place."""
    success_threshold: Real = 0.7
    """Score from which an episode is a success."""
    votes: Positive = 1
    """How often each answer is graded; the mean counts."""
    swap_order: bool = True
    """With `listwise`: ask each vote in both orders of the answers, so that no place is preferred."""
    temperature: Temperature | None = None
    """Temperature of the grading model. null: 0 with one vote, 0.7 with several."""
    max_tokens: Positive = 2048
    """Most tokens per answer of the model."""
    max_concurrent: Positive = 32
    """Most questions at a time, per process."""
    max_retries: Count = 3
    """How often an answer that can't be used is asked for again. After that it is a `judge_error`, never a score."""
    cache: bool = True
    """Keep gradings in the experiment folder: the same question is asked once."""


class OpenJudgeConfig(Section):
    """`ajet.task_judge.openjudge`: a grader of the package py-openjudge, in a process of its own."""

    grader: str = ""
    """The grader: the name of a class of `openjudge.graders`, such as `StringMatchGrader`, or `module->Class`."""
    python: str | None = None
    """The Python interpreter that has py-openjudge. null: the one that ajet runs in."""
    options: Block = Block()
    """What the grader's class is built with, such as `{algorithm: exact_match}`."""
    inputs: dict[str, str] = {}
    """What the grader is given for each answer, by parameter: text in which the placeholders of `llm_judge.prompt` are
    filled in. `query`, `response` and `reference_response` have `{query}`, `{answer}` and `{reference}` unless named
    here."""
    model: str | None = None
    """The model that a grader asks, at the endpoint of `ajet.helper`. null: `ajet.helper.model`. Graders that ask no
    model need none."""
    answer_field: str = "final_answer"
    """Field of the output's metadata that holds the answer. An output without it is judged by its last reply."""
    reference_field: str = "answer"
    """Field of the task's metadata that holds the reference answer."""
    min_score: Real = 0
    """Lowest score that the grader gives."""
    max_score: Real = 1
    """Highest score that it gives. A score outside is a `judge_error`."""
    normalise: bool = True
    """The reward is the score scaled to 0 … 1. False: the score itself."""
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
