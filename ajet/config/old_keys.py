"""Keys of old files: the one table of what became of each, and `translate`, which the loader applies before validation.

A file that carries one still loads, and `ajet validate` and the run say what was done with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Path = tuple[Any, ...]


class Dropped(NamedTuple):
    """The key is read by nothing."""

    reason: str


_ASYNC = Dropped("model calls are always asynchronous")
_BY_TOKENS = Dropped("batches are split by tokens")
_DUPLICATES = Dropped("ajet.helper.embedding_model says how texts are compared; without it, by their words")
_EXAMPLES = Dropped("only the training tasks are examples")
_GATEWAY = Dropped("the gateway is always available")
_HELPER = Dropped("ajet.helper names the helper model")
_LINES = Dropped("graded examples are JSON Lines")
_MEASURED = Dropped("benchmarks/ measures what a run reaches")
_TIMEOUT = Dropped("ajet.helper.timeout is the time for one answer")
_REVIEW = Dropped("a filter's params.max_tokens says it")

OLD_KEYS: Mapping[str, str | Dropped] = {
    "context_tracker.alien_llm_model": _HELPER,
    "context_tracker.alien_llm_response_length": _HELPER,
    "context_tracker.fix_retokenization_drift": Dropped("sampled token ids are kept as sampled"),
    "context_tracker.timeline_merging_policy": Dropped("conversations are always merged exactly, token by token"),
    "debug.debug_vllm_port": Dropped("vLLM gets a free port"),
    "enable_experimental_interchange_server": _GATEWAY,
    "execute_test": _MEASURED,
    "execute_testing_lambda": _MEASURED,
    "interchange": _GATEWAY,
    "interchange_server": _GATEWAY,
    "rollout.agent_madness_reward": "failure_reward.abnormal",
    "rollout.ajet_action_when_overflow": Dropped("failure_reward.overflow says what becomes of overlong episodes"),
    "rollout.log_prob_micro_batch_size": _BY_TOKENS,
    "rollout.log_prob_micro_batch_size_per_gpu": _BY_TOKENS,
    "rollout.mode": _ASYNC,
    "rollout.multi_turn.expected_steps": Dropped("nothing depends on it"),
    "rollout.name": "rollout.engine",
    "rollout.step_skip_action": Dropped("what a step of an environment skips is the workflow's own choice"),
    "rollout.vllm.mode": Dropped("vLLM always runs in servers of its own"),
    "task_judge.llm_judge.timeout": _TIMEOUT,
    "task_judge.parts.*.llm_judge.timeout": _TIMEOUT,
    "task_judge.parts.*.rubrics_auto_grader.dataset_file": "task_judge.parts.*.rubrics_auto_grader.jsonl_dataset_file",
    "task_judge.parts.*.rubrics_auto_grader.input_data_type": _LINES,
    "task_judge.parts.*.rubrics_auto_grader.timeout": _TIMEOUT,
    "task_judge.rubrics_auto_grader.timeout": _TIMEOUT,
    "task_judge.rubrics_auto_grader.input_data_type": _LINES,
    "task_judge.rubrics_auto_grader.dataset_file": "task_judge.rubrics_auto_grader.jsonl_dataset_file",
    "task_reader.data_generation.deduplication_filter.params.api_key": _DUPLICATES,
    "task_reader.data_generation.deduplication_filter.params.base_url": _DUPLICATES,
    "task_reader.data_generation.deduplication_filter.params.db_path": _DUPLICATES,
    "task_reader.data_generation.deduplication_filter.params.model": _DUPLICATES,
    "task_reader.data_generation.document_reader.languages": Dropped("text is read as it is stored"),
    "task_reader.data_generation.query_reader.dataset_file": (
        "task_reader.data_generation.query_reader.jsonl_dataset_file"
    ),
    "task_reader.data_generation.query_reader.huggingface_dat_repo.validation_split": _EXAMPLES,
    "task_reader.data_generation.query_reader.jsonl_dataset_file.validation": _EXAMPLES,
    "task_reader.dataset_file": "task_reader.jsonl_dataset_file",
    "task_reader.env_service.env_action_preference": Dropped("the environment says how the agent should act"),
    "task_reader.feedback_tracing": "task_reader.tracing",
    "task_reader.tracing.alien_llm_response_length": _REVIEW,
    "task_reader.tracing.filters.*.params.max_thread": "task_reader.tracing.max_thread",
    "task_reader.tracing.filters.*.params.api_key": _DUPLICATES,
    "task_reader.tracing.filters.*.params.base_url": _DUPLICATES,
    "task_reader.tracing.filters.*.params.db_path": _DUPLICATES,
    "task_reader.tracing.filters.*.params.model": _DUPLICATES,
    "task_runner.llm_infer_submit_method": _ASYNC,
    "trainer_common.algorithm.per_agent_groups": Dropped("agents are always compared with agents of the same name"),
    "trainer_common.log_prob_micro_batch_size": _BY_TOKENS,
    "trainer_common.log_prob_micro_batch_size_per_gpu": _BY_TOKENS,
}
"""Old key or group below `ajet` → its present name, or why it was dropped. `*` stands for a name of the user's own.

What a group became is in its present name's place when the entries below it are looked up: `feedback_tracing.x` is
`tracing.x`.
"""


OLD_VALUES: Mapping[str, Mapping[str, str]] = {
    "task_reader.type": {
        "deep_finance": "tutorial.example_deep_finance.deep_finance_reader->DeepFinanceReader",
    },
}
"""Key → what a value of old files stands for."""


@dataclass(slots=True)
class Translated:
    """What was done with the old keys of one file."""

    renamed: dict[str, str] = field(default_factory=dict)
    """Old key → present name."""
    outvoted: list[str] = field(default_factory=list)
    """Old keys whose present name was given, too: that one counts."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Old key → the reason."""
    ignored_blocks: list[str] = field(default_factory=list)
    """Top-level blocks of that file that have no meaning here (`hydra`, `defaults`)."""

    def written(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """The path under which the file has what is now at `path`."""
        for old, new in self.renamed.items():
            moved = ("ajet", *new.split("."))
            if path[: len(moved)] == moved:
                return ("ajet", *old.split("."), *path[len(moved) :])
        return path


def translate(tree: dict[str, Any]) -> Translated:
    """Put what old keys say in its present place, in `tree`, and drop what nothing reads."""
    done = Translated()
    ajet = tree.get("ajet")
    if isinstance(ajet, dict):
        # names first: what was below an old group is then looked up below its present name
        for key, became in sorted(OLD_KEYS.items(), key=lambda entry: isinstance(entry[1], Dropped)):
            for group, path in list(_matching(ajet, key.split("."))):
                _apply(ajet, group, path, became, done)
        for key, values in OLD_VALUES.items():
            for group, path in _matching(ajet, key.split(".")):
                if isinstance(value := group[path[-1]], str):
                    group[path[-1]] = values.get(value, value)
    return done


def is_old(path: tuple[str, ...]) -> bool:
    """Whether a key (below `ajet`), or a group above it, is of old files."""
    return any(_begins_with(path, key.split(".")) for key in OLD_KEYS)


def _begins_with(path: Path, pattern: list[str]) -> bool:
    return len(path) >= len(pattern) and all(part in ("*", name) for part, name in zip(pattern, path, strict=False))


def _matching(tree: Any, pattern: list[str], above: Path = ()) -> Iterator[tuple[Any, Path]]:
    """The keys in the tree that a pattern fits, each with the group that holds it."""
    first, *rest = pattern
    if isinstance(tree, list) and first == "*":
        names: list[Any] = list(range(len(tree)))
    elif isinstance(tree, dict):
        names = list(tree) if first == "*" else [first] if first in tree else []
    else:
        return
    for name in names:
        if rest:
            yield from _matching(tree[name], rest, (*above, name))
        else:
            yield tree, (*above, name)


def _apply(ajet: dict[str, Any], group: Any, path: Path, became: str | Dropped, done: Translated) -> None:
    value, old = group.pop(path[-1]), ".".join(map(str, path))
    if isinstance(became, Dropped):
        done.dropped[old] = became.reason
        return
    names = [path[index] if part == "*" else part for index, part in enumerate(became.split("."))]
    place: Any = ajet
    for part in names[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):  # its type is checked later
            return
    if names[-1] in place:
        done.outvoted.append(old)
    else:
        place[names[-1]] = value
        done.renamed[old] = ".".join(names)
