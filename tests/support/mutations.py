"""A valid config, and 200 ways to get it wrong. Each says what the error has to name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

VALID = """\
ajet:
  project_name: demo
  experiment_name: read_yaml_name
  backbone: local
  model:
    path: tiny:qwen2-0.3m
    dtype: auto
    lora:
      enabled: false
      rank: 8
  data:
    max_prompt_length: 3000
    max_response_length: 15000
    train_batch_size: 32
  rollout:
    user_workflow: flow.py->Flow
    engine: torch
    num_repeat: 4
    temperature: 0.9
    top_p: 1.0
    gamma: 1.0
    max_model_len: 18000
    max_env_worker: 64
    max_num_seqs: 10
    max_response_length_in_one_turn: 4096
    compute_madness_checklist: [nonsense]
    agent_madness_termination: true
    force_disable_toolcalls: false
    episode_timeout: 1200
    reasoning_history: template
    enable_oversample: false
    submit_oversample_multiplier: 1.5
    tensor_model_parallel_size: 1
    multi_turn:
      max_steps: 30
      max_sample_per_task: 30
    val_kwargs:
      temperature: 0.0
      do_sample: false
      num_repeat: 1
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file:
      training:
        file_path: train.jsonl
      validation:
        file_path: val.jsonl
  task_judge:
    judge_type: customized_protocol
    judge_protocol: judge.py->Judge
    alien_llm_response_length: 512
  context_tracker:
    shared_token_loss: once
    detect_timeline_snap: false
  debug:
    debug_max_parallel: 4
    debug_first_n_tasks: 2
    debug_vllm_seed: 3
  trainer_common:
    total_epochs: 50
    save_freq: 20
    test_freq: 20
    val_pass_n: 4
    mini_batch_num: 1
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl
    nnodes: 1
    logger: [console, file]
    algorithm:
      adv_estimator: grpo
      clip_low: 0.2
      loss_norm: token_mean
    optim:
      lr: 1.0e-6
  task_runner:
    wrapper_type: asyncio-with-gc
    wrapper_multiprocessing_timeout: 3600
  failure_reward:
    timeout: drop
    truncated: judge
    abnormal: -1.0
  gateway:
    host: 127.0.0.1
    port: 0
  recorder:
    keep: all
    max_gb: 10
frozen_lake:
  size: 4
"""

LINES = VALID.splitlines()


class Mutation(NamedTuple):
    """A broken file and what its error must name."""

    name: str
    content: bytes
    names: tuple[str, ...]
    """Text that the error must hold: place, key, suggestion."""


def lay_out(folder: Path) -> None:
    """The files that the valid config names. Importing the code leaves a trace: nothing may do that."""
    for name in ("flow", "judge"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'canary')!r}, 'w')\nclass {name.title()}: pass\n")
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text('{"query": "1+1?"}\n')


def mutations() -> list[Mutation]:
    """All of them, always the same."""
    kinds = (typos, wrong_groups, wrong_types, ranges, choices, files, contradictions, syntax, interpolations, attacks)
    return [mutation for kind in kinds for mutation in kind()]


def number_of(key: str, *, after: str = "") -> int:
    """The line of a key, counted from 1."""
    start = next((index for index, line in enumerate(LINES) if line.strip() == f"{after}:"), -1) if after else -1
    return next(
        index for index, line in enumerate(LINES) if index > start and line.split(":")[0].strip() == key
    ) + 1  # fmt: skip


def replaced(line: int, text: str) -> bytes:
    """The file with one line exchanged; its indentation stays."""
    old = LINES[line - 1]
    lines = list(LINES)
    lines[line - 1] = old[: len(old) - len(old.lstrip())] + text
    return "\n".join(lines).encode()


def path_of(line: int) -> str:
    """The dotted key that stands on a line."""
    parts: list[str] = []
    depth = 1_000
    for text in reversed(LINES[:line]):
        indent = len(text) - len(text.lstrip())
        if indent < depth:
            parts.append(text.split(":")[0].strip())
            depth = indent
    return ".".join(reversed(parts))


def _misspelt(word: str, draw: random.Random) -> str:
    at = draw.randrange(1, len(word) - 1)
    ways: tuple[Callable[[], str], ...] = (
        lambda: word[:at] + word[at + 1 :],
        lambda: word[:at] + word[at] + word[at:],
        lambda: word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        lambda: word.replace("_", "-") if "_" in word else word + "s",
        lambda: word.upper(),
    )
    wrong = draw.choice(ways)()
    return wrong if wrong != word else word + "x"


def typos() -> Iterator[Mutation]:
    """One letter wrong in a key."""
    draw = random.Random(0)
    for line, text in enumerate(LINES[:-2], start=1):
        word, _, rest = text.strip().partition(":")
        if line == 1 or line % 4 == 0 or word in ("size", "lr"):
            continue
        wrong = _misspelt(word, draw)
        right = path_of(line)
        place = f"broken.yaml:{line}: {right.removesuffix(word)}{wrong}"
        yield Mutation(f"typo {wrong}", replaced(line, f"{wrong}:{rest}"), (place, right))


def wrong_groups() -> Iterator[Mutation]:
    """A key under another group than its own."""
    for group, key, home in (
        ("data", "num_repeat", "rollout"),
        ("data", "max_model_len", "rollout"),
        ("rollout", "train_batch_size", "data"),
        ("rollout", "max_prompt_length", "data"),
        ("rollout", "max_steps", "rollout.multi_turn"),
        ("rollout", "judge_protocol", "task_judge"),
        ("trainer_common", "lr", "trainer_common.optim"),
        ("trainer_common", "adv_estimator", "trainer_common.algorithm"),
        ("trainer_common", "gamma", "rollout"),
        ("debug", "total_epochs", "trainer_common"),
        ("model", "rank", "model.lora"),
        ("task_judge", "user_workflow", "rollout"),
        ("gateway", "max_env_worker", "rollout"),
        ("recorder", "debug_first_n_tasks", "debug"),
    ):
        line = number_of(group) + 1
        content = "\n".join([*LINES[: line - 1], f"    {key}: 1", *LINES[line - 1 :]]).encode()
        names = (f"broken.yaml:{line}: ajet.{group}.{key}", f"ajet.{home}.{key}")
        yield Mutation(f"{key} under {group}", content, names)


def _values(kind: str, changes: tuple[tuple[str, str, str, str], ...]) -> Iterator[Mutation]:
    for after, key, value, says in changes:
        line = number_of(key, after=after)
        names = (f"broken.yaml:{line}: {path_of(line)}", says)
        yield Mutation(f"{kind} {key}: {value}", replaced(line, f"{key}: {value}"), names)


def wrong_types() -> Iterator[Mutation]:
    """Words for numbers, numbers for switches, groups for values."""
    whole, number, switch, text = "expected a whole number", "expected a number", "true or false", "expected text"
    yield from _values(
        "type",
        (
            ("", "train_batch_size", "many", whole),
            ("", "train_batch_size", "3.5", whole),
            ("", "train_batch_size", "true", whole),
            ("", "train_batch_size", "[1, 2]", whole),
            ("", "train_batch_size", "{a: 1}", whole),
            ("", "train_batch_size", "null", whole),
            ("", "train_batch_size", "32k", whole),
            ("", "max_prompt_length", "3,000", whole),
            ("", "num_repeat", "four", whole),
            ("", "max_model_len", "'18 000'", whole),
            ("", "temperature", "hot", number),
            ("", "temperature", "false", number),
            ("", "temperature", ".nan", number),
            ("", "temperature", "0,9", number),
            ("", "episode_timeout", "20min", number),
            ("", "episode_timeout", ".inf", number),
            ("", "kl_loss_coef", "[0.1]", number),
            ("", "lr", "1e-6e", number),
            ("", "agent_madness_termination", "maybe", switch),
            ("", "agent_madness_termination", "3", switch),
            ("", "enable_oversample", "[true]", switch),
            ("", "detect_timeline_snap", "''", switch),
            ("", "user_workflow", "[a, b]", text),
            ("", "user_workflow", "{file: flow.py}", text),
            ("model", "path", "12", text),
            ("model", "path", "true", text),
            ("", "host", "[127]", text),
            ("", "compute_madness_checklist", "{a: 1}", "a list"),
            ("", "logger", "{a: 1}", "a list"),
            ("", "save_freq", "often", whole),
            ("", "port", "auto", whole),
        ),
    )
    for group in ("model", "rollout", "data", "trainer_common", "multi_turn", "optim", "lora"):
        line = number_of(group)
        indent = len(LINES[line - 1]) - len(LINES[line - 1].lstrip())
        following = line
        while following < len(LINES) and LINES[following].startswith(" " * (indent + 1)):
            following += 1
        content = "\n".join([*LINES[: line - 1], f"{' ' * indent}{group}: 5", *LINES[following:]]).encode()
        names = (f"broken.yaml:{line}: {path_of(line)}", "expected a group of keys")
        yield Mutation(f"{group} is not a group", content, names)


def ranges() -> Iterator[Mutation]:
    """Right type, impossible value."""
    yield from _values(
        "range",
        (
            ("", "train_batch_size", "0", "at least 1"),
            ("", "train_batch_size", "-32", "at least 1"),
            ("", "num_repeat", "0", "at least 1"),
            ("", "temperature", "-0.1", "at least 0"),
            ("", "temperature", "11", "at most 10"),
            ("", "top_p", "0", "above 0"),
            ("", "top_p", "1.01", "at most 1"),
            ("", "gamma", "0", "above 0"),
            ("", "gamma", "2", "at most 1"),
            ("", "max_model_len", "0", "at least 1"),
            ("", "episode_timeout", "0", "above 0"),
            ("", "submit_oversample_multiplier", "0.5", "at least 1"),
            ("", "max_steps", "0", "at least 1"),
            ("", "tensor_model_parallel_size", "0", "at least 1"),
            ("", "port", "-1", "at least 0"),
            ("", "save_freq", "-2", "at least -1"),
            ("", "clip_low", "1.5", "at most 1"),
            ("", "kl_loss_coef", "-0.1", "at least 0"),
            ("", "total_epochs", "0", "at least 1"),
            ("", "max_gb", "0", "above 0"),
            ("", "wrapper_multiprocessing_timeout", "-1", "above 0"),
        ),
    )


def choices() -> Iterator[Mutation]:
    """A word that is none of those allowed."""
    yield from _values(
        "choice",
        (
            ("", "backbone", "verll", "did you mean `verl`?"),
            ("", "dtype", "bf16", "`bfloat16`"),
            ("", "engine", "vlllm", "did you mean `vllm`?"),
            ("", "reasoning_history", "templat", "did you mean `template`?"),
            ("", "adv_estimator", "GRPO", "did you mean `grpo`?"),
            ("", "adv_estimator", "gae", "`reinforce_plus_plus`"),
            ("", "loss_norm", "token-mean", "did you mean `token_mean`?"),
            ("", "kl_loss_type", "low_var", "did you mean `low_var_kl`?"),
            ("", "wrapper_type", "multiprocessing", "did you mean `multi-processing`?"),
            ("", "shared_token_loss", "twice", "`multiplicity`"),
            ("", "judge_type", "custom_protocol", "did you mean `customized_protocol`?"),
            ("task_reader", "type", "jsonl", "`jsonl_dataset_file`"),
            ("task_reader", "type", "jsonl_dataset_files", "did you mean `jsonl_dataset_file`?"),
            ("", "compute_madness_checklist", "[nonsens]", "did you mean `nonsense`?"),
            ("", "logger", "[console, wandbb]", "did you mean `wandb`?"),
            ("", "logger", "tensorbord", "did you mean `tensorboard`?"),
            ("failure_reward", "timeout", "judge", "`drop`"),
            ("", "truncated", "judged", "did you mean `judge`?"),
            ("", "keep", "every", "`every_n`"),
        ),
    )


def files() -> Iterator[Mutation]:
    """Names of files that are not there."""
    yield from _values(
        "file",
        (
            ("", "user_workflow", "flwo.py->Flow", "did you mean 'flow.py'?"),
            ("", "user_workflow", "nowhere/at/all.py->Flow", "no file 'all.py'"),
            ("", "user_workflow", "flow.py", "write `module.path->Class`"),
            ("", "user_workflow", "flow.py:Flow", "flow.py->Flow"),
            ("", "judge_protocol", "jugde.py->Judge", "did you mean 'judge.py'?"),
            ("training", "file_path", "trian.jsonl", "did you mean `train.jsonl`?"),
            ("training", "file_path", "data/train.jsonl", "looked in"),
            ("training", "file_path", ".", "it is a folder"),
            ("validation", "file_path", "vall.jsonl", "did you mean `val.jsonl`?"),
            ("task_reader", "type", "reader.py->Reader", "no file 'reader.py'"),
            ("model", "path", "./checkpoints/none", "write a path that exists"),
            ("model", "path", "a/b/c/d", "write a path that exists"),
        ),
    )
    line = number_of("total_epochs")
    names = (f"broken.yaml:{line}: ajet.trainer_common.resume", "no folder")
    yield Mutation("file resume", replaced(line, "resume: checkpoints/step_9"), names)


def contradictions() -> Iterator[Mutation]:
    """Values that are fine alone."""
    for key, value, blamed, says in (
        ("max_model_len", "17000", "rollout.max_model_len", "raise rollout.max_model_len to 18000"),
        ("num_repeat", "1", "rollout.num_repeat", "nothing would be learnt"),
        ("temperature", "0", "rollout.temperature", "set a temperature above 0"),
        ("engine", "torch\n    max_staleness: 1", "rollout.max_staleness", "set rollout.engine: vllm"),
        ("mini_batch_num", "33", "trainer_common.mini_batch_num", "lower mini_batch_num to 32"),
        ("engine", "remote", "rollout.engine", "use --backbone=debug"),
        ("num_repeat", "4\n    min_group_size: 5", "rollout.min_group_size", "lower min_group_size"),
        ("host", "127.0.0.1\n    key_ttl: 600", "gateway.key_ttl", "leave gateway.key_ttl out, or raise it"),
        ("engine", "vllm\n    deterministic: true", "rollout.deterministic", "set rollout.engine: torch"),
    ):
        yield Mutation(f"contradiction {key}", replaced(number_of(key), f"{key}: {value}"), (f"ajet.{blamed}: ", says))


def syntax() -> Iterator[Mutation]:
    """What is not YAML, or not a config."""
    line = number_of("num_repeat")
    yield Mutation("tab", replaced(line, "\tnum_repeat: 4"), (f"broken.yaml:{line}", "a tab"))
    yield Mutation("tabs only", VALID.replace("  ", "\t").encode(), ("broken.yaml:2", "indent with spaces"))
    yield Mutation("tab in a group", b"ajet:\n\trollout:\n\t\tnum_repeat: 4\n", ("broken.yaml:2", "indent with spaces"))
    for key in ("num_repeat", "rollout", "ajet"):
        at = number_of(key)
        indent = len(LINES[at - 1]) - len(LINES[at - 1].lstrip())
        end = len(LINES) - 2 if key == "ajet" else number_of("task_reader") - 1
        content = "\n".join([*LINES[:end], f"{' ' * (4 if key == 'num_repeat' else indent)}{key}: 1", *LINES[end:]])
        names = (f"broken.yaml:{end + 1}", f"the key {key!r} is there twice (first on line {at})")
        yield Mutation(f"twice {key}", content.encode(), names)
    yield Mutation("quote", replaced(line, 'num_repeat: "4'), ("not YAML", f"line {line} opens it"))
    yield Mutation("bracket", replaced(line, "compute_madness_checklist: [a"), ("not YAML", f"line {line} opens it"))
    yield Mutation("brace", replaced(line, "num_repeat: {4"), ("not YAML", f"line {line} opens it"))
    yield Mutation("colon", replaced(line, "num_repeat 4"), (f"broken.yaml:{line}: not YAML", "a key needs"))
    yield Mutation("wide colon", replaced(line, "num_repeat\uff1a4"), (f"broken.yaml:{line}:", "an ordinary colon"))
    yield Mutation("no-break space", replaced(line, "num_repeat:\xa04"), (f"broken.yaml:{line}:", "an ordinary space"))
    no_break = VALID.replace("    num_repeat", "\xa0" * 4 + "num_repeat").encode()
    yield Mutation("no-break indentation", no_break, (f"broken.yaml:{line}: a no-break", "indent with spaces"))
    yield Mutation("two colons", replaced(line, "num_repeat: a: 4"), (f"broken.yaml:{line}", "needs quotes"))
    yield Mutation("indentation", replaced(line, " num_repeat: 4"), ("broken.yaml:", "indentation"))
    yield Mutation("at sign", replaced(line, "num_repeat: @4"), (f"broken.yaml:{line}", "quote text"))
    yield Mutation(
        "template", replaced(line, "num_repeat: {{ n }}"), (f"broken.yaml:{line}", "{{n}} stands for a value")
    )
    yield Mutation("two documents", f"{VALID}---\na: 1\n".encode(), (f"broken.yaml:{len(LINES) + 1}", "one document"))
    yield Mutation("empty", b"", ("broken.yaml", "`ajet:`"))
    yield Mutation("only a comment", b"# nothing\n", ("broken.yaml", "`ajet:`"))
    yield Mutation("a list", b"- ajet\n", ("broken.yaml:1", "`ajet:`"))
    yield Mutation("a word", b"ajet\n", ("broken.yaml:1", "`ajet:`"))
    yield Mutation("no ajet", b"frozen_lake: {size: 4}\n", ("broken.yaml:1", "`ajet:`"))
    yield Mutation(
        "ajet misspelt", VALID.replace("ajet:", "ajjet:", 1).encode(), ("broken.yaml:1", "did you mean `ajet:`")
    )
    yield Mutation("ajet is a list", b"ajet: [1]\n", ("broken.yaml:1: ajet", "expected a group of keys"))
    yield Mutation("group at the top", VALID.encode() + b"data: {train_batch_size: 1}\n", ("data", "`ajet.data`"))
    misspelt = VALID.encode() + b"data: {train_batch_size: 1, max_promt_length: 8}\n"
    yield Mutation("group at the top, with an unknown key", misspelt, ("data", "`ajet.data`"))
    yield Mutation("needed", b"ajet: {}\n", ("ajet.rollout.user_workflow: is needed", "user_workflow: path/to/file.py"))
    yield Mutation("latin-1", VALID.replace("demo", "d\xe9mo").encode("latin-1"), ("broken.yaml:2", "UTF-8"))
    yield Mutation("utf-16", VALID.encode("utf-16"), ("broken.yaml:1", "UTF-8"))
    yield Mutation("nul", replaced(line, "num_repeat: 4\0"), (f"broken.yaml:{line}", "remove the control character"))
    yield Mutation("escape", replaced(line, "num_repeat: \x1b[31m4"), (f"broken.yaml:{line}", "control character"))


def interpolations() -> Iterator[Mutation]:
    """References that lead nowhere, in circles, or grow without end."""
    line = number_of("num_repeat")
    key = f"broken.yaml:{line}: ajet.rollout.num_repeat"
    for value, says in (
        ("${ajet.rollout.num_repeat}", "remove the cycle"),
        ("${.num_repeat}", "remove the cycle"),
        ("${ajet.rollout}", "remove the cycle"),
        ("${ajet.rollout.num_repeats}", "num_repeats"),
        ("${nowhere.at.all}", "nowhere"),
        ("${oc.env:AJET_NOT_SET_ANYWHERE}", "AJET_NOT_SET_ANYWHERE"),
        ("${oc.evn:HOME}", "Unsupported interpolation"),
        ("${ajet.rollout", "not a valid interpolation"),
        ("${python:1+1}", "Unsupported interpolation"),
        ("${eval:'__import__(\"os\")'}", "interpolation"),
        ("${ajet.${ajet.model.path}.x}", "can't be computed"),
        ("???", "on the command line"),
        ("${oc.env:HOME}", "expected a whole number"),
    ):
        yield Mutation(f"interpolation {value}", replaced(line, f"num_repeat: {value}"), (key, says))
    circle = "a: ${b}\nb: ${c}\nc: ${a}\n"
    yield Mutation("a circle of three", f"{VALID}{circle}".encode(), ("broken.yaml:", "remove the cycle"))
    doubled = "".join(f"x{n}: '${{x{n + 1}}}${{x{n + 1}}}'\n" for n in range(60)) + "x60: '0123456789'\n"
    yield Mutation("doubling text", f"{VALID}{doubled}".encode(), ("broken.yaml:", "too large"))
    nodes = "".join(f"y{n}: ['${{y{n + 1}}}', '${{y{n + 1}}}', '${{y{n + 1}}}']\n" for n in range(40)) + "y40: [1, 2]\n"
    yield Mutation("tripling lists", f"{VALID}{nodes}".encode(), ("broken.yaml:", "too large"))


def attacks() -> Iterator[Mutation]:
    """Files made to run something or to fill the memory."""
    line = number_of("num_repeat")
    for tag in (
        "!!python/object/apply:os.system ['touch canary']",
        "!!python/object/new:os.system ['touch canary']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object:os.path {}",
        "!!python/tuple [1, 2]",
        "!!python/str x",
        "!!binary aGVsbG8=",
        "!!set {a}",
        "!!timestamp 2026-01-01",
        "!include secrets.yaml",
        "!ENV HOME",
        "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch canary']",
    ):
        names = (f"broken.yaml:{line}", "is not allowed", "remove the tag")
        yield Mutation(f"tag {tag}", replaced(line, f"num_repeat: {tag}"), names)
    yield Mutation("tag on a key", replaced(line, "!!python/name:os.system num_repeat: 4"), (f":{line}", "not allowed"))
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
    )
    yield Mutation("billion laughs", f"{laughs}{VALID}".encode(), ("broken.yaml:", "anchors"))
    merges = "m0: &m0 {k: [1, 2, 3]}\n" + "".join(
        f"m{n}: &m{n} {{<<: *m{n - 1}, a{n}: *m{n - 1}, b{n}: *m{n - 1}}}\n" for n in range(1, 40)
    )
    yield Mutation("multiplying merges", f"{merges}{VALID}".encode(), ("broken.yaml:", "anchors"))
    yield Mutation("an anchor in itself", f"{VALID}loop: &loop [*loop]\n".encode(), ("*loop", "contains itself"))
    yield Mutation("deep lists", f"{VALID}deep: {'[' * 5000}\n".encode(), ("broken.yaml:", "levels deep"))
    yield Mutation("deep mappings", f"{VALID}deep: {'{a: ' * 5000}\n".encode(), ("broken.yaml:", "levels deep"))
    stairs = "".join(f"{' ' * depth}k:\n" for depth in range(1, 200))
    yield Mutation("stairs", f"{VALID}deep:\n{stairs}".encode(), ("broken.yaml:", "levels deep"))
    yield Mutation("huge", VALID.encode() + b"# " + b"x" * 3_000_000, ("broken.yaml", "larger than"))
    yield Mutation("huge list", f"{VALID}many: [{'1,' * 100_000}]\n".encode(), ("broken.yaml:", "values"))
    yield Mutation("undefined alias", f"{VALID}what: *nothing\n".encode(), ("broken.yaml:", "*nothing", "&nothing"))
    yield Mutation("noise", random.Random(1).randbytes(4000), ("broken.yaml",))
    yield Mutation("long number", replaced(line, f"num_repeat: {'9' * 10_000}"), (f":{line}: ajet.rollout.num_repeat",))
    yield Mutation("long float", replaced(line + 1, f"temperature: 1{'0' * 400}.0"), ("ajet.rollout.temperature",))
