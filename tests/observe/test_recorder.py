"""Episodes on disk: exact, filtered, bounded, and safe from a kill."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ajet.backbone.local.demonstrations import count_demonstrations, replay
from ajet.config import make_config
from ajet.observe.episode_codec import Annotation, decode_episode, encode_episode, token_bytes_of
from ajet.observe.episode_store import EpisodeFilter, EpisodeNotFoundError, EpisodeStore, RecordedEpisode
from ajet.observe.episode_tables import EpisodeStoreError
from ajet.observe.export import ExportFormat, export_episodes, sft_records
from ajet.observe.logs import MASK, Masker
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.statistics import TaskFilter, task_page
from ajet.schema.episode import ROOT, CallTree, EnvironmentEvent, EnvironmentRecord, Episode, EpisodeStatus, Failure
from ajet.schema.errors import TaskDataError
from ajet.schema.task import Task
from ajet.task_reader.tracing import exchanges
from support.synthetic_run import Vocabulary, credit_of, math_episode, trainer_logprobs
from support.task_counts import counted_tasks
from support.tracker_helpers import Drive, episode_of, said, user

TESTS = Path(__file__).parents[1]
TASK = Task(
    main_query="How many?",
    task_id="apples-0000",
    metadata={"answer": "41", "api_key": "secret-of-a-task", "long": "x" * 30_000},
)


def episodes(count: int, seed: int = 0, vocabulary: Vocabulary | None = None) -> list[Episode]:
    rng, vocabulary = random.Random(seed), vocabulary or Vocabulary()
    return [math_episode(vocabulary, rng, task=i // 4, step=i // 8, repeat=i % 4) for i in range(count)]


def test_an_episode_comes_back_bit_for_bit(tmp_path: Path) -> None:
    vocabulary = Vocabulary()
    group = episodes(4, vocabulary=vocabulary)
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite", tokenizer=vocabulary)
    rng = random.Random(1)
    logprobs = [trainer_logprobs(episode, rng) for episode in group]
    for episode, credit, trainer in zip(group, credit_of(group), logprobs, strict=True):
        assert recorder.record(episode, 3, credit, trainer_logprobs=trainer, task=TASK).result()
    recorder.close()
    store = EpisodeStore(tmp_path / "episodes.sqlite")
    for episode, trainer in zip(group, logprobs, strict=True):
        back = store.get(episode.episode_id)
        assert back.step == 3 and back.query == "How many?"
        kept = store.task(episode.task_id)
        assert kept is not None and kept.metadata["answer"] == "41" and kept.metadata["api_key"] == MASK
        assert len(kept.metadata["long"]) < 21_000 and "10,000 more characters" in kept.metadata["long"]
        for mine, theirs in zip(episode.tree.runs, back.episode.tree.runs, strict=True):
            assert np.array_equal(mine.ids, theirs.ids) and mine.ids.dtype == theirs.ids.dtype
        for mine_call, their_call in zip(episode.tree.calls, back.episode.tree.calls, strict=True):
            assert mine_call.logprobs.tobytes() == their_call.logprobs.tobytes()
            assert np.array_equal(mine_call.mask, their_call.mask)
            assert (mine_call.reply, mine_call.fork, mine_call.versions) == (
                their_call.reply, their_call.fork, their_call.versions,
            )  # fmt: skip
        assert back.episode.ledger == episode.ledger and back.episode.status is episode.status
        assert back.annotation.trainer_logprobs is not None
        assert all(np.array_equal(a, b) for a, b in zip(trainer, back.annotation.trainer_logprobs, strict=True))
    ids = group[0].tree.path_ids(group[0].tree.calls[0].run)
    text = store.token_bytes(sorted(set(ids.tolist())))
    assert b"".join(text[index] for index in ids).decode().startswith("<|im_start|>system\nYou solve problems")


def test_filters_sort_and_pages(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    everyone = episodes(64)
    for index, episode in enumerate(everyone):
        recorder.record(episode, index // 8, validation=index >= 56)
    recorder.flush()
    store = EpisodeStore(tmp_path / "e.sqlite")
    rows, total = store.page(limit=10)
    assert total == 64 and len(rows) == 10 and rows[0]["episode_id"] == everyone[-1].episode_id
    rows, total = store.page(EpisodeFilter(step_min=2, step_max=3), sort="reward", descending=False)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    assert total == 16 and rewards == sorted(rewards)
    assert {row["group_id"] for row in store.page(EpisodeFilter(group=everyone[5].group_id))[0]} == {
        everyone[5].group_id
    }
    with_checker = sum(any(call.agent == "checker" for call in episode.tree.calls) for episode in everyone)
    assert store.page(EpisodeFilter(agent="checker"))[1] == with_checker
    assert store.page(EpisodeFilter(validation=True))[1] == 8
    failed = [episode for episode in everyone if episode.status is EpisodeStatus.WORKFLOW_ERROR]
    assert store.page(EpisodeFilter(status="workflow_error"))[1] == len(failed)
    facets = store.facets()
    assert facets.total == 64 and facets.last_step == 7 and facets.tags.keys() == {"easy", "medium", "hard"}
    assert store.neighbours(everyone[1].episode_id) == (everyone[0].episode_id, everyone[2].episode_id)
    with pytest.raises(EpisodeNotFoundError, match=r"ajet\.recorder\.keep"):
        store.get("nothing")
    recorder.close()


def test_what_the_file_can_hold_as_text_only_is_recorded_and_can_be_replaced(tmp_path: Path) -> None:
    """The index is told the old text when an episode is replaced or deleted: it must be the text that it was given."""
    (one,) = episodes(1)
    one.metadata = {"answer": 3**90, "small": 2**63}
    one.tree.calls[0].reply["content"] = "\ud800 is half of a pair" + " and so on" * 19_998
    one.tree.calls[0].new_messages[0]["content"] = 10**30
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    for step in range(3):
        assert recorder.record(one, step).result()
    assert recorder.rewind(1).result() and recorder.record(one, 1).result()
    recorder.close()
    store = EpisodeStore(tmp_path / "e.sqlite")
    assert store.get(one.episode_id).episode.metadata == {"answer": str(3**90), "small": 2**63}
    assert store.page(EpisodeFilter(text="half of a pair"))[1] == store.page(EpisodeFilter(text=str(10**30)))[1] == 1


def test_an_episode_that_is_replaced_is_counted_anew(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    store = EpisodeStore(tmp_path / "e.sqlite")
    (episode,) = episodes(1)
    for status in (EpisodeStatus.CANCELLED, EpisodeStatus.COMPLETED):
        episode.status = status
        assert recorder.record(episode, 1).result()
        assert store.facets().statuses == {status: 1}
    recorder.close()


def test_text_filter_finds_words_phrases_and_chinese_and_reads_no_query_language(tmp_path: Path) -> None:
    one, two = episodes(2)
    one.tree.calls[0].reply["content"] = 'The "quick" fox; 苹果的数量是五 NEAR(x)'
    two.tree.calls[0].reply["content"] = "fox quick the"
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    recorder.record(one, 0)
    recorder.record(two, 0)
    recorder.close()
    store = EpisodeStore(tmp_path / "e.sqlite")

    def found(text: str) -> set[str]:
        return {row["episode_id"] for row in store.page(EpisodeFilter(text=text))[0]}

    both = {one.episode_id, two.episode_id}
    assert found("fox qui") == both
    assert found('"quick fox"') == {one.episode_id}
    assert found("数量") == {one.episode_id} and found("量数") == set()
    for hostile in ("NEAR(", "a AND", '"', "*", "text:fox", "'; DROP TABLE episode", "-fox", "\0"):
        found(hostile)
    assert found("  ") == both


def test_keep_failures_and_every_n(tmp_path: Path) -> None:
    everyone = episodes(200)
    failures = EpisodeRecorder(tmp_path / "f.sqlite", make_config({"recorder.keep": "failures"}).ajet)
    kept = [failures.record(episode, 1).result() for episode in everyone]
    assert kept == [episode.status is not EpisodeStatus.COMPLETED for episode in everyone] and any(kept)
    failures.close()
    every = EpisodeRecorder(
        tmp_path / "n.sqlite", make_config({"recorder.keep": "every_n", "recorder.every_n": 3}).ajet
    )
    assert [every.record(episode, step).result() for step, episode in enumerate(everyone[:7])] == [
        True, False, False, True, False, False, True,
    ]  # fmt: skip
    every.close()


def test_size_is_bounded_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    limit = 1024 * 1024
    recorder = EpisodeRecorder(tmp_path / "e.sqlite", make_config({"recorder.max_gb": limit / 1024**3}).ajet)
    rng, vocabulary = random.Random(0), Vocabulary()
    for index in range(150):
        recorder.record(math_episode(vocabulary, rng, task=index, long=6000), index)
        if index % 25 == 0:
            recorder.flush()
    recorder.close()
    store = EpisodeStore(tmp_path / "e.sqlite")
    rows, total = store.page(limit=1000)
    assert 0 < total < 150 and rows[0]["step"] == 149, "the newest stay"
    assert (tmp_path / "e.sqlite").stat().st_size < 3 * limit
    assert store.page(EpisodeFilter(text="apples"))[1] == total, "the text index forgot the deleted episodes"


@pytest.mark.parametrize("way", ["room", "rewind"])
def test_a_damaged_episode_can_be_deleted(tmp_path: Path, way: str) -> None:
    recorder = EpisodeRecorder(
        tmp_path / "e.sqlite", make_config({"recorder.max_gb": 1e-3 if way == "room" else 10.0}).ajet
    )
    rng, vocabulary = random.Random(0), Vocabulary()
    everyone = [math_episode(vocabulary, rng, task=index, long=6000) for index in range(60)]
    assert recorder.record(everyone[0], 1).result()
    with sqlite3.connect(tmp_path / "e.sqlite") as connection:
        connection.execute("UPDATE body SET data = x'00'")
    if way == "rewind":
        assert recorder.rewind(0).result(timeout=20)
    for one in everyone[1:]:
        assert recorder.record(one, 1).result(timeout=20)
    recorder.close()
    store = EpisodeStore(tmp_path / "e.sqlite")
    assert not store.has(everyone[0].episode_id) and store.has(everyone[59].episode_id)


def test_a_task_without_a_question_is_shown_by_what_the_agent_was_told(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite")
    for number, query in enumerate(("", "[not defined]", "How many?")):
        episode = math_episode(Vocabulary(), random.Random(number), task=0)
        recorder.record(episode, 1, task=Task(main_query=query, task_id=episode.task_id))
    recorder.close()
    rows, _ = EpisodeStore(tmp_path / "episodes.sqlite").page(sort="id", descending=False)
    told, same, asked = (row["preview"] for row in rows)
    assert told == same != "" and told.startswith("A shop sells") and asked == "How many?"


def test_episodes_of_one_task_that_were_asked_something_else_keep_their_questions(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    first, second = (math_episode(Vocabulary(), random.Random(number), task=number) for number in range(2))
    second.task_id = first.task_id  # as those of a service that names no task
    recorder.record(first, 1, task=Task(main_query="How many?", task_id=first.task_id))
    recorder.record(second, 1, task=Task(main_query="What else?", task_id=first.task_id))
    recorder.close()
    store = EpisodeStore(tmp_path / "e.sqlite")
    said = [message["content"] for message in second.tree.calls[0].new_messages if message["role"] == "user"]
    assert [store.get(one.episode_id).query for one in (first, second)] == ["How many?", said[0]]
    assert [exchange.query for exchange in exchanges(tmp_path / "e.sqlite")] == ["How many?", said[0]]


def test_a_resume_forgets_later_steps(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    group = [episode for episode in episodes(40) if episode.usable]
    for step, episode in enumerate(group[:4]):
        recorder.record(episode, step, credit_of(group)[0] if step == 0 else None)
    assert recorder.rewind(1).result()
    recorder.close()
    store = EpisodeStore(tmp_path / "e.sqlite")
    rows, total = store.page()
    assert total == 2 and rows[1]["advantage"] is not None and rows[0]["advantage"] is None


def test_a_resume_forgets_a_validation_that_was_cut_off(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    for index, episode in enumerate(episodes(6)):
        recorder.record(episode, 1 + index // 2, validation=index % 2 == 1)
    kept = []
    for validated in (True, False):
        assert recorder.rewind(2, validated=validated).result()
        rows, _ = EpisodeStore(tmp_path / "e.sqlite").page()
        kept.append(sorted((row["step"], row["validation"]) for row in rows))
    recorder.close()
    assert kept == [[(1, 0), (1, 1), (2, 0), (2, 1)], [(1, 0), (1, 1), (2, 0)]]


def test_odd_values_are_recorded_and_cost_no_other_episode(tmp_path: Path) -> None:
    one, two, three = episodes(3)
    one.metadata = {"object": object(), "numpy": np.float32(2), "half": "\ud83d"}
    one.tree.calls[0].reply["content"] = "half a pair \ud83d and \u202e bidi \x00\x1b[31m"
    one.task_id, one.tag, one.tree.calls[0].agent = "task\ud800", "\udfff", "agent\ud801"
    two.failure = Failure("X", "y", "z")
    two.tree.calls[0].turn = "not a number"  # type: ignore[assignment]
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    futures = [recorder.record(episode, 1) for episode in (one, two, three)]
    assert futures[0].result() and futures[2].result()
    with pytest.raises(TypeError):
        futures[1].result()
    recorder.close()
    store = EpisodeStore(tmp_path / "e.sqlite")
    assert "half a pair \\ud83d" in store.get(one.episode_id).episode.tree.calls[0].reply["content"]
    assert {row["task_id"] for row in store.page()[0]} >= {"task\\ud800"}
    assert store.page()[1] == 2


def test_exports(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(
        tmp_path / "e.sqlite", make_config({"trainer_common.save_trajectory_as_json_file": True}).ajet
    )
    group = episodes(12)
    group[0].log_metrics["ratio"] = float("nan")
    for episode in group:
        recorder.record(episode, 1)
    recorder.close()
    store = EpisodeStore(tmp_path / "e.sqlite")
    assert export_episodes(store, EpisodeFilter(), ExportFormat.JSONL, tmp_path / "all.jsonl") == 12
    first = json.loads((tmp_path / "all.jsonl").read_text().splitlines()[0])
    file = tmp_path / "trajectories" / "step_1" / f"{group[0].episode_id}.json"
    for text in (file.read_text(), (tmp_path / "all.jsonl").read_text()):
        assert '"ratio": null' in text, "NaN is not JSON"
    assert first["tree"]["calls"][0]["logprobs"] == group[0].tree.calls[0].logprobs.tolist()
    wins = EpisodeFilter(reward_min=1.0)
    count = export_episodes(store, wins, ExportFormat.SFT, tmp_path / "sft.jsonl")
    record = json.loads((tmp_path / "sft.jsonl").read_text().splitlines()[0])
    assert count >= store.page(wins)[1] and [message["role"] for message in record["messages"]][:2] == [
        "system",
        "user",
    ]
    assert record["messages"][-1]["role"] == "assistant" and record["tools"][0]["function"]["name"] == "calculator"
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = export_episodes(store, EpisodeFilter(), ExportFormat.PARQUET, tmp_path / "calls.parquet")
    table = parquet.read_table(tmp_path / "calls.parquet")
    assert table.num_rows == calls == sum(len(episode.tree.calls) for episode in group)
    assert table["token_ids"][0].as_py() == group[0].tree.runs[group[0].tree.calls[0].run].ids.tolist()
    assert len(list((tmp_path / "trajectories" / "step_1").glob("*.json"))) == 12


def test_a_call_without_a_reply_costs_no_demonstration(tmp_path: Path) -> None:
    (episode,) = episodes(1)
    episode.reward = 1.0
    calls = episode.tree.calls
    unanswered = replace(
        calls[-1], extends=len(calls) - 1, run=ROOT, reply={}, new_messages=[{"role": "user", "content": "And then?"}]
    )
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")
    recorder.record(episode, 1)
    recorder.flush()
    store = EpisodeStore(tmp_path / "e.sqlite")
    before = list(sft_records(store.all()))
    calls.append(unanswered)
    recorder.record(episode, 1)
    recorder.close()
    assert before and list(sft_records(store.all())) == before


def test_a_reply_that_another_one_replaced_is_no_demonstration(tmp_path: Path) -> None:
    (episode,) = episodes(1)
    episode.reward = 1.0
    episode.agent_rewards = {call.agent: -0.5 for call in episode.tree.calls}
    answered = [call for call in episode.tree.calls if call.run != ROOT and call.trainable]
    recorder = EpisodeRecorder(tmp_path / "e.sqlite")

    def shown() -> list[dict[str, Any]]:
        recorder.record(episode, 1)
        recorder.flush()
        return list(sft_records(EpisodeStore(tmp_path / "e.sqlite").all()))

    before = shown()
    assert {record["reward"] for record in before} == {-0.5}
    assert before[0]["messages"][-1] == answered[-1].reply
    for dropped in ("abandoned", "failure_reward"):
        answered[-1].drop = dropped  # type: ignore[assignment]
        assert all(answered[-1].reply not in record["messages"] for record in shown())
    recorder.close()


def test_episodes_of_a_validation_are_not_imitated(tmp_path: Path) -> None:
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite")
    for index, episode in enumerate(episodes(4)):
        episode.reward = 1.0
        recorder.record(episode, 1, validation=index > 0)
    recorder.close()
    sft = "trainer_common.algorithm.sft"
    config = make_config({f"{sft}.demonstrations": str(tmp_path), f"{sft}.min_reward": 0.5})
    assert count_demonstrations(config) == 1
    recorder = EpisodeRecorder(tmp_path / "episodes.sqlite")
    recorder.rewind(0)
    for episode in episodes(4):
        episode.reward = 1.0
        recorder.record(episode, 1, validation=True)
    recorder.close()
    with pytest.raises(TaskDataError, match=r"the 4 of a validation, .* FILE.jsonl --format sft --reward-min 0.5`"):
        count_demonstrations(config)


def test_what_is_imitated_from_an_export_is_what_was_trained() -> None:
    """Not what the prompt shows, was cut by its length, isn't trained, or has been shown before."""
    drive = Drive("qwen3")
    talk = [user("Go."), said("Given."), user("Now you.")]
    for answer in ("one", "two"):
        drive.ask(talk, said(answer, reasoning_content="Hm."), text=f"<think>\nHm.\n</think>\n\n{answer}")
        talk.append(user("More."))
    drive.ask(talk, said("thr"), finish="length", end=False)
    quick: dict[str, Any] = {"kwargs": {"enable_thinking": False}}
    talk = [user("Quick!")]
    drive.ask(talk, said("Other."), trainable=False, **quick)
    drive.ask([*talk, user("And you?")], said("Mine."), **quick)
    episode = episode_of(drive.tracker.finish(1.0))
    tree = decode_episode(encode_episode(episode)).tree

    def trained(tree: CallTree) -> list[list[int]]:
        return [tree.runs[call.run].ids.tolist() for call in tree.calls if call.mask.any()]

    imitated = []
    recorded = RecordedEpisode(replace(episode, tree=tree), 1, False, 0.0, "", Annotation())
    for record in sft_records(iter([recorded])):
        kwargs = record.get("chat_template_kwargs")
        imitated += trained(replay(drive.renderer, record["messages"], template_kwargs=kwargs).tree)
    assert imitated == [ids for ids in trained(tree) if ids[-1] == drive.tokenizer.eos_token_id]


def test_bytes_of_tokens() -> None:
    class ByteLevel:
        def __init__(self) -> None:
            self.added_tokens_decoder = {3: "<|end|>"}
            self.tokens = ["Ġhello", "ä½", "ł", "<|end|>"]

        def get_vocab(self) -> dict[str, int]:
            return {**{token: index for index, token in enumerate(self.tokens)}, "Ġ": 9}

        def convert_ids_to_tokens(self, index: int) -> str:
            return self.tokens[index]

    named = token_bytes_of(ByteLevel())(range(4))
    assert named[0] == b" hello" and (named[1] + named[2]).decode() == "你" and named[3] == b"<|end|>"


WRITER = """
import random, sys
from pathlib import Path
from ajet.observe.recorder import EpisodeRecorder
from support.synthetic_run import Vocabulary, credit_of, math_episode
rng, vocabulary = random.Random(int(sys.argv[2])), Vocabulary()
recorder = EpisodeRecorder(Path(sys.argv[1]), tokenizer=vocabulary)
for index in range(1_000_000):
    episode = math_episode(vocabulary, rng, task=index)
    done = recorder.record(episode, index, credit_of([episode])[0])
    done.add_done_callback(lambda done, name=episode.episode_id: print(name, flush=True))
    if index % 7 == 0:
        done.result()
"""


def rows_equal_episodes(store: EpisodeStore) -> bool:
    """Whether the table of tasks says the same from the rows that are kept as from the episodes, at one moment."""
    store._connection.execute("BEGIN")
    try:
        assert not store.rows("SELECT 1 FROM tried_dirty")
        kept, _ = task_page(store, TaskFilter(), limit=10_000)
        return [replace(row, reward=None) for row in kept] == [
            replace(row, reward=None) for row in counted_tasks(store)
        ]
    finally:
        store._connection.execute("COMMIT")


def kill_and_check(path: Path, seed: int, wait: float) -> tuple[int, int]:
    """Kill a writer at a random moment. Returns how many episodes it had acknowledged, and how many are lost."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    program = [sys.executable, "-c", WRITER, str(path), str(seed)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    store = EpisodeStore(path)
    until = time.monotonic() + wait
    try:
        while time.monotonic() < until:
            assert rows_equal_episodes(store)
    finally:
        process.kill()
    acknowledged = [line.strip() for line in [first, *process.stdout] if line.endswith("\n")]
    process.wait()
    assert rows_equal_episodes(store)
    assert store._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    there = set(store.ids())
    lost = [name for name in acknowledged if name not in there]
    for name in [name for name in acknowledged if name in there][-3:]:
        store.get(name).episode.ledger.balance()
    store.close()
    return len(acknowledged), len(lost)


@pytest.mark.parametrize("damage", ["all of it", "the first task's page", "not a database"])
def test_a_damaged_file_is_named_before_anything_runs(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "episodes.sqlite"
    recorder = EpisodeRecorder(path)
    for index in range(50):
        recorder.record(math_episode(Vocabulary(), random.Random(index), task=index), index)
    recorder.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE tried_threshold SET value = 0.5")  # so that the episodes are counted again
    (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'tried_step'").fetchone()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    data = bytearray(path.read_bytes())
    start, end = {"all of it": (4096, len(data)), "not a database": (0, 100)}.get(
        damage, ((page - 1) * 4096, page * 4096)
    )
    data[start:end] = b"\xff" * (end - start)
    path.write_bytes(data)
    with pytest.raises(EpisodeStoreError, match=r"episodes\.sqlite: (file is not|database disk image).*move it away"):
        EpisodeRecorder(path)
    assert path.read_bytes()[4096:] == bytes(data[4096:]), "nothing is overwritten"


@pytest.mark.slow
def test_a_kill_loses_no_acknowledged_episode(tmp_path: Path) -> None:
    rng = random.Random()
    path = tmp_path / "episodes.sqlite"
    kills = [kill_and_check(path, seed, rng.random() * 0.2) for seed in range(20)]
    assert sum(acknowledged for acknowledged, _ in kills) > 20
    assert sum(lost for _, lost in kills) == 0


def test_what_an_environment_was_asked_is_kept_without_secrets(tmp_path: Path) -> None:
    (episode,) = episodes(1)
    events = [
        EnvironmentEvent("reset", 0.0, 0.1, observation="begin"),
        EnvironmentEvent("step", 0.2, 0.1, 0.5, True, action="go", error="refused: key hunter2hunter2"),
    ]
    episode.environment = EnvironmentRecord("http://service", events, left_out=3)
    recorder = EpisodeRecorder(tmp_path / "e.sqlite", masker=Masker({"api_key": "hunter2hunter2"}))
    recorder.record(episode, 1)
    recorder.close()
    kept = EpisodeStore(tmp_path / "e.sqlite").get(episode.episode_id).episode.environment
    assert kept is not None and kept.name == "http://service" and kept.left_out == 3
    assert kept.events[0] == events[0] and kept.events[1].reward == 0.5 and kept.events[1].done
    assert "refused: key" in kept.events[1].error and "hunter2" not in kept.events[1].error
