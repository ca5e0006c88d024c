"""Every key of the schema has an effect, or is listed as having none: no key is documented as working that isn't."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from string import Formatter

import pytest

from ajet.cli.config import FIRST_KEYS
from ajet.config import BackboneName, Config
from ajet.config.contradictions import RULES, TRAINABLE_ENGINES
from ajet.config.effects import ONLY_ON, ONLY_WITH_ENGINE, entry, given_keys
from ajet.config.keys import known_keys
from ajet.config.kinds import BACKBONES, ENGINES
from ajet.config.old_keys import OLD_KEYS, Dropped
from ajet.config.problems import ContradictionRule
from support.config_reads import Node, edges, leaves_read_by, reachable, reads, sources

FOR_USER_CODE = (
    "grounding_weight",
    "judge",
    "presentation_quality_weight",
    "rm_weight",
    "task_judge.alien_llm_model",
    "task_judge.alien_llm_response_length",
    "task_reader.deep_finance",
    "task_reader.options",
    "user",
)
"""Keys for the user's own classes to read."""

KEYS = {".".join(path[1:]): key for path, key in known_keys().items() if path[0] == "ajet" and len(path) > 1}
LEAVES = {name for name, key in KEYS.items() if key.section is None}
MODULES = {name: place.partition("->")[0] for name, place in BACKBONES.items()}
PACKAGES = {**MODULES, "debug view": "ajet.backbone.debug"}
STAND_INS = ("ajet.backbone.ray.trinity.cpu_trainer", "ajet.backbone.ray.verl.cpu_platform")
"""What replaces GPUs in tests is not what users run."""


def below(key: str, groups: object) -> bool:
    return entry(dict.fromkeys(groups, True), key) is not None  # type: ignore[call-overload]


def names(leaves: set[tuple[str, ...]]) -> set[str]:
    return {".".join(path[1:]) for path in leaves if path[0] == "ajet"}


def engine_modules(engine: str) -> list[str]:
    return [module for module in sources() if f"{module}.".startswith(f"ajet.engine.{engine}.")]


def read_on(backbone: str) -> set[str]:
    """The keys that a run on this backbone can come to read."""
    without = [module for name, module in PACKAGES.items() if name.split()[0] != backbone]
    without += [module for module in sources() if module.startswith("ajet.cli.") and module != "ajet.cli.main"]
    without += [*STAND_INS, "ajet.backbone.trainer_api", "ajet.backbone.memory"]  # before a run, not in it
    if backbone in ("debug", "prompt"):
        of_training = ("check_formulas", "formulas", "recipe", "starts_over")
        without += [f"ajet.backbone.checks.{name}" for name in of_training]
    if backbone in ("verl", "trinity"):
        # their engines are made elsewhere
        without += [f"{node.module}.{node.name}" for node in edges() if node.name == "build_engine"]
    if backbone == "local":
        unused = set(ENGINES) - set(TRAINABLE_ENGINES)
        without += [module for engine in unused for module in engine_modules(engine)]
    nodes = reachable([("ajet.backbone.launch", "run"), (MODULES[backbone], "run")], without)
    return names(leaves_read_by(nodes))


def readers(key: str) -> list[Node]:
    return [node for node, paths in reads().items() if key in names(paths)]


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """The modules' syntax trees stay: going through them again and again takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def read_somewhere() -> set[str]:
    return names(leaves_read_by(reads()))


def test_the_analysis_sees_the_program(read_somewhere: set[str]) -> None:
    """Should it find nothing, the other tests would mean nothing."""
    assert len(read_somewhere) > 150
    for key in ("rollout.num_repeat", "rollout.min_group_size", "trainer_common.optim.lr", "failure_reward.timeout"):
        assert key in read_somewhere


def test_every_key_is_read_or_listed(read_somewhere: set[str]) -> None:
    without_reader = sorted(key for key in LEAVES - read_somewhere if not below(key, FOR_USER_CODE))
    assert not without_reader, (
        "read nowhere: remove these keys, or, if old files carry them, list them in "
        f"ajet/config/old_keys.py: {without_reader}"
    )


def test_old_keys_are_gone_and_their_present_names_are_there() -> None:
    for old, became in OLD_KEYS.items():
        if "*" not in old:
            assert old not in KEYS, old
            assert isinstance(became, Dropped) or became in KEYS, became


def test_lists_name_keys_that_exist() -> None:
    for listed in (FOR_USER_CODE, ONLY_ON, ONLY_WITH_ENGINE):
        assert not [key for key in listed if key not in KEYS]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.keys[0])
def test_contradictions_name_keys_that_exist(rule: ContradictionRule) -> None:
    """In their messages, too."""
    messages = [text for text in (rule.what, rule.fix) if isinstance(text, str)]
    shown = [name for text in messages for _, name, _, _ in Formatter().parse(text) if name is not None]
    for key in (*rule.keys, *shown):
        assert ("ajet", *key.split(".")) in known_keys()


@pytest.mark.parametrize("backbone", BACKBONES)
def test_each_backbone_reads_the_keys_that_are_said_to_work_there(
    backbone: BackboneName, read_somewhere: set[str]
) -> None:
    read = read_on(backbone)
    wrong = []
    for key in sorted(read_somewhere):
        if backbone in ("debug", "local") and below(key, ONLY_WITH_ENGINE):
            continue  # what engines read is the next test's question
        if below(key, FOR_USER_CODE):
            continue  # read by whichever classes the YAML names
        works = backbone in (entry(ONLY_ON, key) or BACKBONES)
        if works != (key in read):
            wrong.append(f"{key}: {'not read' if works else 'read'}")
    assert not wrong, f"ajet/config/effects.py (ONLY_ON) says otherwise on {backbone}: {wrong}"


def test_each_engine_reads_the_keys_that_are_said_to_work_with_it(read_somewhere: set[str]) -> None:
    for key in sorted(key for key in read_somewhere if below(key, ONLY_WITH_ENGINE)):
        rooms = {
            node.module.split(".")[2].removesuffix("_client")
            for node in readers(key)
            if node.module.startswith("ajet.engine.")
        }
        assert rooms, f"{key} is read by no engine"
        assert rooms <= {*entry(ONLY_WITH_ENGINE, key), "base"}, f"{key} is read by {rooms}"


def test_only_what_the_user_set_is_given() -> None:
    config = Config.model_validate({"ajet": {"rollout": {"seed": 1, "multi_turn": {}}, "user": {"mine": 1}}})
    assert list(given_keys(config.ajet)) == ["rollout.seed", "user"]


def test_the_page_begins_with_forty_keys_that_exist() -> None:
    assert len(FIRST_KEYS) == 40 == len(set(FIRST_KEYS))
    assert not [key for key in FIRST_KEYS if key not in KEYS]


def test_no_more_keys_than_the_house_has_room_for() -> None:
    assert len(LEAVES) <= 387
