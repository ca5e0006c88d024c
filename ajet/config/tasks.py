"""`ajet.task_reader`: where tasks come from; `ajet.task_judge`: how a workflow's output becomes a reward.

Of `task_reader`'s blocks, only the one named by `type` is used.
"""

from __future__ import annotations

from typing import Literal

from ajet.config.judges import JudgePartConfig, LlmJudgeConfig, OpenJudgeConfig, PartName, RubricsConfig
from ajet.config.kinds import JudgeName, ReaderName
from ajet.config.section import Block, Count, OneOrMore, Positive, Real, Section, Share, Temperature


class FileConfig(Section):
    """One file of tasks."""

    file_path: str | None = None
    """A JSON Lines file: one task per line."""


class FieldsConfig(Section):
    """Which fields of a record make a task. All other fields go to the task's metadata."""

    main_query: OneOrMore = ["main_query", "question", "prompt", "query"]
    """Fields that may hold the problem's text; the first one present counts."""
    task_id: OneOrMore = ["task_id", "id"]
    """Fields that may hold a unique id. Without one, it is derived from the record."""
    init_messages: OneOrMore = ["init_messages", "messages"]
    """Fields that may hold the first messages."""
    env_type: OneOrMore = ["env_type"]
    """Fields that may name the environment."""
    tag: OneOrMore = ["tag"]
    """Fields that may hold a label, by which metrics are broken down."""


class JsonlConfig(Section):
    """`ajet.task_reader.jsonl_dataset_file`: tasks from JSON Lines files."""

    training: FileConfig = FileConfig()
    """Tasks to train on."""
    validation: FileConfig = FileConfig()
    """Tasks to validate on; none if not given."""


class HuggingFaceConfig(Section):
    """`ajet.task_reader.huggingface_dat_repo`: tasks through the `datasets` library."""

    dataset_path: str | None = None
    """A data set on the hub (`openai/gsm8k`), a local folder, or a parquet, json, jsonl or csv file."""
    dataset_name: str | None = None
    """Its configuration (such as `main`), if it has several."""
    training_split: str | None = "train"
    """Split to train on."""
    validation_split: str | None = None
    """Split to validate on; none if not given."""


class EnvServiceConfig(Section):
    """`ajet.task_reader.env_service`: tasks from an environment service."""

    env_type: str = ""
    """The environment's name."""
    env_url: str = ""
    """Where the service answers."""
    api_key: str | None = None
    """The service's key, preferably as `${oc.env:NAME}`."""
    training_split: str = "train"
    """Split to train on."""
    validation_split: str = "dev"
    """Split to validate on."""


class DocumentReaderConfig(Section):
    """`ajet.task_reader.data_generation.document_reader`: documents to generate tasks from."""

    document_path: OneOrMore = []
    """Files (txt, md, pdf, docx, html) or folders of them."""
    chunk_size: Positive = 5120
    """Characters per chunk."""
    split_by: Literal["sentence", "paragraph", "character"] = "sentence"
    """Where a document may be cut."""
    cache_enabled: bool = True
    """Keep the tasks and the model's answers in the experiment folder."""


class QueryFilesConfig(Section):
    """`ajet.task_reader.data_generation.query_reader.jsonl_dataset_file`: a file of example tasks."""

    training: FileConfig = FileConfig()
    """Example tasks."""


class QueryHubConfig(Section):
    """`ajet.task_reader.data_generation.query_reader.huggingface_dat_repo`: example tasks of a data set."""

    dataset_path: str | None = None
    """As in `task_reader.huggingface_dat_repo`."""
    dataset_name: str | None = None
    """Its configuration, if it has several."""
    training_split: str | None = "train"
    """The split that holds the examples."""


class QueryReaderConfig(Section):
    """`ajet.task_reader.data_generation.query_reader`: example tasks."""

    type: Literal["jsonl_dataset_file", "dataset_file", "huggingface_dat_repo"] = "jsonl_dataset_file"
    """Where they are: the block of this name."""
    jsonl_dataset_file: QueryFilesConfig = QueryFilesConfig()
    huggingface_dat_repo: QueryHubConfig = QueryHubConfig()


class SamplingParamsConfig(Section):
    """`ajet.task_reader.data_generation.sampling_params`: how the model's answers are sampled."""

    temperature: Temperature = 0.0
    """Temperature of the model that writes tasks."""


class DeduplicationParamsConfig(Section):
    """`ajet.task_reader.data_generation.deduplication_filter.params`: how similar is too similar."""

    similarity_threshold: Share = 0.8
    """Tasks more similar than this count as one."""


class DeduplicationConfig(Section):
    """`ajet.task_reader.data_generation.deduplication_filter`: drop tasks that are too similar to others."""

    enabled: bool = True
    """Drop tasks that are too similar to others."""
    params: DeduplicationParamsConfig = DeduplicationParamsConfig()


class DataGenerationConfig(Section):
    """`ajet.task_reader.data_generation`: tasks written by a model from documents."""

    document_reader: DocumentReaderConfig = DocumentReaderConfig()
    query_reader: QueryReaderConfig = QueryReaderConfig()
    task_num: Positive = 10
    """How many tasks to generate."""
    llm_model: str = ""
    """The model that writes them, at `ajet.helper`'s endpoint. Empty: `ajet.helper.model`."""
    llm_filter: bool = True
    """Have the model check each task, and drop what is unclear, unanswerable or wrongly answered."""
    llm_response_length: Positive = 8192
    """Most tokens per answer."""
    num_workers: Positive = 32
    """Most requests at a time."""
    sampling_params: SamplingParamsConfig = SamplingParamsConfig()
    deduplication_filter: DeduplicationConfig = DeduplicationConfig()


class TraceFilterParamsConfig(Section):
    """`ajet.task_reader.tracing.filters.….params`."""

    custom_rubrics: str = ""
    """`llm_evaluate`: further rules for the reviewing model."""
    temperature: Temperature = 0.0
    """`llm_evaluate`: temperature of the reviewing model."""
    max_tokens: Positive = 2048
    """`llm_evaluate`: most tokens of a review."""
    print_reason: bool = False
    """`llm_evaluate`: log why each task is dropped."""
    similarity_threshold: Share = 0.8
    """`deduplication`: tasks more similar than this count as one."""


class TraceFilterConfig(Section):
    """`ajet.task_reader.tracing.filters`: one filter of the tasks found in traces."""

    type: Literal["llm_evaluate", "deduplication"] = "llm_evaluate"
    """`llm_evaluate`: a model reviews each task and answer. `deduplication`: near duplicates are dropped."""
    enabled: bool = True
    """Whether it is applied."""
    params: TraceFilterParamsConfig = TraceFilterParamsConfig()
    """Its settings."""


class TracingConfig(Section):
    """`ajet.task_reader.tracing`: tasks from production traces."""

    base_url: OneOrMore = []
    """Files or folders: AgentScope-Studio's SQLite, OpenTelemetry spans as OTLP JSON, an `episodes.sqlite`."""
    train_output_path: str | None = None
    """A JSON Lines file that collects accepted tasks; their traces aren't reviewed again."""
    validation_share: Share = 0.3
    """Share of the tasks to validate on. A task keeps its side when traces are added."""
    min_reward: Real | None = None
    """Take only episodes with at least this reward from an `episodes.sqlite`."""
    alien_llm_model: str = ""
    """The reviewing model, at `ajet.helper`'s endpoint. Empty: `ajet.helper.model`."""
    max_thread: Positive = 32
    """Most questions to the reviewing model at a time."""
    filters: list[TraceFilterConfig] = []
    """Filters of the tasks found: `{type, enabled, params}`. Exact repetitions are always dropped."""


class HarborConfig(Section):
    """`ajet.task_reader.harbor`: tasks in Harbor's format."""

    training_path: str | None = None
    """A folder of tasks to train on, each a folder with `task.toml`, `instruction.md` and `tests`."""
    validation_path: str | None = None
    """A folder of tasks to validate on; none if not given."""


class RandomDummyConfig(Section):
    """`ajet.task_reader.random_dummy`: made-up tasks, to try a workflow without data."""

    num_tasks: Positive = 1000
    """Training tasks."""
    num_validation_tasks: Count | None = None
    """Validation tasks. null: the training tasks."""


class CurriculumConfig(Section):
    """`ajet.task_reader.curriculum`: choose training tasks by how often they were solved lately."""

    enabled: bool = False
    """Prefer tasks that are solved sometimes, and those never tried."""
    explore: Share = 0.2
    """Share of the probability that is spread evenly over all tasks."""
    memory: Share = 0.5
    """What earlier tries of a task count, relative to a new group's. 0: only the latest group."""


class TaskReaderConfig(Section):
    """`ajet.task_reader`: where tasks come from. Of the blocks, only the one named by `type` is used."""

    type: ReaderName = "jsonl_dataset_file"
    """Which reader: one of these, or your own as `path/file.py->YourReader`."""
    jsonl_dataset_file: JsonlConfig = JsonlConfig()
    huggingface_dat_repo: HuggingFaceConfig = HuggingFaceConfig()
    random_dummy: RandomDummyConfig = RandomDummyConfig()
    env_service: EnvServiceConfig = EnvServiceConfig()
    """Tasks from an environment service. The service is also the episodes' environment, unless `rollout.environment`
    names another. With a reader of your own, it is only that, and only if `env_url` is given."""
    data_generation: DataGenerationConfig = DataGenerationConfig()
    tracing: TracingConfig = TracingConfig()
    harbor: HarborConfig = HarborConfig()
    options: Block = Block()
    """Settings for your own reader."""
    deep_finance: Block = Block()
    """For `type: deep_finance`, the reader of AgentJet's example."""
    fields: FieldsConfig = FieldsConfig()
    shuffle: bool = True
    """Shuffle the training tasks anew in each epoch (by `seed`). False: file order."""
    curriculum: CurriculumConfig = CurriculumConfig()
    seed: Count = 0
    """Seed of the shuffle and of the curriculum."""
    skip_bad_lines: Count = 0
    """Most bad lines per file to skip; each is logged. More are an error."""


class TaskJudgeConfig(Section):
    """`ajet.task_judge`: how a workflow's output becomes a reward, if the workflow returns none."""

    judge_type: JudgeName = "customized_protocol"
    """Kind of judge: `customized_protocol` (the class in `judge_protocol`), `llm_judge` (a model grades by your
    prompt), `rubrics_auto_grader` (by rubrics from graded examples), `openjudge` (a grader of py-openjudge), `tests`
    (the task's `test_command`, in the sandbox), `harbor` (the task's `test.sh`, likewise) or `composite` (the
    weighted sum of `parts`)."""
    judge_protocol: str | None = None
    """Your judge, if workflows return no reward: `module.path->Class` or `path/file.py->Class`."""
    success_threshold: Real = 1.0
    """Reward from which an episode counts as a success, unless the workflow or the judge says so."""
    math_verify: bool | None = None
    """Whether `MathAnswerAsJudge` asks math-verify where its own rules can't decide. null: if it is installed."""
    max_error_share: Share = 0.2
    """The run stops when the judge failed in more than this share of a step's episodes."""
    alien_llm_model: str = ""
    """For a judge of yours to read."""
    alien_llm_response_length: Positive = 512
    """For a judge of yours to read."""
    llm_judge: LlmJudgeConfig = LlmJudgeConfig()
    """With `judge_type: llm_judge`, or as a part: a model grades by your prompt."""
    rubrics_auto_grader: RubricsConfig = RubricsConfig()
    """With `judge_type: rubrics_auto_grader`, or as a part: a model grades by rubrics."""
    openjudge: OpenJudgeConfig = OpenJudgeConfig()
    """With `judge_type: openjudge`, or as a part: a grader of py-openjudge."""
    parts: dict[PartName, JudgePartConfig] = {}
    """With `composite`: judges by name, each recorded as `reward/<name>`."""
    success_part: str | None = None
    """With `composite`: the part that says whether an episode succeeded. null: the sum reaches `success_threshold`."""
