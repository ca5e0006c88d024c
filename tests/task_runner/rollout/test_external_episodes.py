"""Episodes that programs elsewhere begin and end: over real HTTP, with right and wrong keys, and too late."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import openai
import pytest

from ajet.config import make_config
from ajet.config.contradictions import contradictions
from ajet.gateway.gateway import Gateway
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import ConfigError
from ajet.schema.task import WorkflowOutput, WorkflowTask
from ajet.task_judge.base_judge import BaseJudge, GroupJudge, JudgedEpisode, Later
from ajet.task_runner.attempt import WorkflowAttempt
from ajet.task_runner.endings import LateJudge
from ajet.task_runner.external_episodes import KEY_VARIABLE, ExternalEpisodes, ExternalRunner, service_key
from ajet.task_runner.pool import RolloutPool
from ajet.task_runner.runner import TaskRunner
from support.runner_fakes import LineEngine, SmallProvider

KEY = "sk-ajet-the-service"


class Service:
    """An external program."""

    def __init__(self, base_url: str, external: ExternalEpisodes, ended: list[Episode]) -> None:
        self.base_url, self.external, self.ended = base_url, external, ended
        self.http = httpx.AsyncClient(trust_env=False, timeout=30)

    async def post(self, path: str, key: str, body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.post(f"{self.base_url}/{path}", json=body or {}, headers=headers)

    async def begin(self, **task: Any) -> dict[str, Any]:
        reply = await self.post("episodes", KEY, {"task": task} if task else {})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def call(self, episode: dict[str, Any]) -> str:
        async with openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"]) as client:
            messages: Any = [{"role": "user", "content": "hi"}]
            reply = await client.chat.completions.create(model=episode["model"], messages=messages)
            return str(reply.choices[0].message.content)

    async def end(self, episode: dict[str, Any], key: str = "", **outcome: Any) -> httpx.Response:
        return await self.post(f"episodes/{episode['episode_id']}/end", key or episode["control_key"], outcome)


Scene = Callable[[Service], Awaitable[None]]


def play(scene: Scene, monkeypatch: pytest.MonkeyPatch, judge: type[BaseJudge] | None = None, **keys: Any) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    overrides = {key.replace("__", "."): value for key, value in keys.items()}
    config = make_config({"task_runner.wrapper_type": "outside", "rollout.num_repeat": 2, **overrides})

    async def run() -> None:
        sessions = SmallProvider(config, LineEngine("hello"))
        gateway = sessions.gateway = Gateway()
        await gateway.start()
        judging = judge(config) if judge else None
        attempts = ExternalRunner(sessions, judging)
        late = LateJudge(lambda: judging, config.ajet.rollout)
        runner = TaskRunner(sessions, attempts, late)
        ended: list[Episode] = []
        pool = RolloutPool(runner, config, on_episode=ended.append)
        external = ExternalEpisodes(config, attempts, pool)
        gateway.external = external
        service = Service(gateway.base_url, external, ended)
        try:
            async with asyncio.timeout(60):
                await scene(service)
        finally:
            await service.http.aclose()
            await external.aclose()
            await attempts.aclose()
            await gateway.aclose()

    asyncio.run(run())


def test_groups_form_by_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        cats = [await service.begin(task_id="cats", main_query="cats?") for _ in range(2)]
        other = [await service.begin() for _ in range(2)]
        for reward, episode in enumerate([*cats, *other]):
            assert await service.call(episode) == "hello"
            reply = await service.end(episode, reward=reward, metadata={"user": "u"})
            assert (reply.status_code, reply.json()["ended"]) == (200, True)
        groups = await service.external.next_groups(2, step=1)
        assert [(group.task_id, [one.reward for one in group.episodes]) for group in groups] == [
            ("cats", [0.0, 1.0]),
            ("outside", [2.0, 3.0]),
        ]
        assert all(group.complete for group in groups)
        assert groups[0].episodes[0].metadata == {"user": "u"}
        assert [one.status for one in service.ended] == [EpisodeStatus.COMPLETED] * 4

    play(scene, monkeypatch)


def test_each_episode_keeps_the_task_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        asked = ["what?", "who?", "where?"]
        begun = [await service.begin(main_query=query) for query in asked]
        given = [service.external.task_of(episode["episode_id"]) for episode in begun]
        assert [task and task.main_query for task in given] == asked

    play(scene, monkeypatch)


def test_what_had_ended_before_it_was_trained_is_kept_with_its_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can play it again."""

    async def scene(service: Service) -> None:
        whole = [await service.begin(task_id="whole") for _ in range(2)]
        half, failed, still_open = [await service.begin(task_id=name) for name in ("half", "failed", "open")]
        for episode, outcome in (
            (whole[0], {"reward": 0.25}),
            (whole[1], {"reward": 0.5}),
            (half, {"reward": 0.75}),
            (failed, {"failure": "the user left"}),
        ):
            await service.call(episode)
            assert (await service.end(episode, **outcome)).status_code == 200
        while len(service.ended) < 4:
            await asyncio.sleep(0.01)
        taking = asyncio.create_task(service.external.next_groups(2, step=1))
        await asyncio.sleep(0.01)
        taking.cancel()  # a run that is interrupted while it waits for the second
        await asyncio.gather(taking, return_exceptions=True)
        await service.external.aclose()
        said = {one.episode_id: one.failure.message for one in service.external.untrained if one.failure}
        ended = "the run ended before it trained this episode's group; its reward was "
        assert said == {
            whole[0]["episode_id"]: f"{ended}0.25",
            whole[1]["episode_id"]: f"{ended}0.5",
            half["episode_id"]: f"{ended}0.75",
            failed["episode_id"]: "the user left",
            still_open["episode_id"]: "the episode was stopped",
        }
        assert not any(one.usable or one.tree.trained_tokens for one in service.external.untrained)

    play(scene, monkeypatch)


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        first, second = await service.begin(), await service.begin()
        for key in ("sk-ajet-wrong", first["api_key"], first["control_key"]):
            assert (await service.post("episodes", key)).status_code == 401
        assert (await service.http.get(f"{service.base_url}/episodes")).status_code == 405
        for key in (first["api_key"], second["control_key"], KEY):
            assert (await service.end(first, key, reward=1)).status_code in (401, 403)
        assert (await service.post("rewards", first["api_key"], {"reward": 9})).status_code == 403
        assert (await service.post("rewards", first["control_key"], {"reward": 0.5})).status_code == 200
        assert (await service.end(first)).status_code == 200
        assert (await service.end(first, reward=1)).status_code in (401, 409), "over"
        with pytest.raises(openai.APIStatusError):
            await service.call(first)
        assert (await service.end(second, failure="the user left")).status_code == 200
        while len(service.ended) < 2:
            await asyncio.sleep(0.01)
        given, failed = service.ended
        assert (given.reward, given.status) == (0.5, EpisodeStatus.COMPLETED)
        assert failed.failure is not None and failed.failure.message == "the user left"

    play(scene, monkeypatch)


@pytest.mark.parametrize(
    "body",
    [
        {"reward": "1"}, {"reward": float("1e308") * 1.0, "extra": 1}, {"metadata": []}, {"is_success": "yes"},
        {"failure": 5}, {"reward": True},
    ],
)  # fmt: skip
def test_an_unreadable_end_ends_nothing(monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]) -> None:
    async def scene(service: Service) -> None:
        episode = await service.begin()
        assert (await service.end(episode, **body)).status_code == 400
        assert (await service.post("episodes", KEY, {"task": {"task_id": 5}})).status_code == 400
        assert (await service.post("episodes", KEY, {"task": {"what": 5}})).status_code == 400
        assert (await service.post("episodes", KEY, {"task": "x"})).status_code == 400
        assert (await service.post("episodes", KEY, {"task": {"main_query": "x" * 2**20}})).status_code == 413
        typo = await service.post("episodes", KEY, {"taks": {"task_id": "x"}})
        assert (typo.status_code, "no such field: taks; fields: task" in typo.text) == (400, True)
        assert (await service.end(episode, reward=1)).status_code == 200

    play(scene, monkeypatch)


class Judge(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        return workflow_output.metadata["stars"] / 5, True


def test_without_a_reward_the_judge_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        for stars in (1, 4):
            await service.end(await service.begin(), metadata={"stars": stars})
        (group,) = await service.external.next_groups(1, step=1)
        assert sorted(one.reward for one in group.episodes) == [0.2, 0.8]

    play(scene, monkeypatch, Judge)


class Hangs(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> float:
        while workflow_output.metadata["hang"]:
            time.sleep(0.05)
        return 1.0


def test_judges_that_hang_keep_no_other_episode_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads Python's own executor would have."""
    hanging = min(32, (os.cpu_count() or 1) + 4)

    async def scene(service: Service) -> None:
        for number in range(hanging + 1):
            await service.end(await service.begin(), metadata={"hang": number < hanging})
        while not service.ended:
            await asyncio.sleep(0.01)
        assert (service.ended[0].status, service.ended[0].reward) == (EpisodeStatus.COMPLETED, 1.0)

    play(scene, monkeypatch, Hangs, rollout__episode_timeout=20)


class ByStars(GroupJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Later:
        return Later()

    def compute_group_rewards(self, episodes: Sequence[JudgedEpisode]) -> list[float]:
        stars = [episode.workflow_output.metadata["stars"] for episode in episodes]
        return [value / max(stars) for value in stars]


class EachByItself(ByStars):
    per_episode = True


@pytest.mark.parametrize("judge", [ByStars, EachByItself])
def test_an_episode_that_waits_for_its_judge_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch, judge: type[BaseJudge]
) -> None:
    async def scene(service: Service) -> None:
        for stars in (2, 4):
            await service.end(await service.begin(), metadata={"stars": stars})
        alone = await service.begin(task_id="alone")
        await service.end(alone, metadata={"stars": 3})
        (group,) = await service.external.next_groups(1, step=1)
        expected = [0.5, 1.0] if judge is ByStars else [1.0, 1.0]
        assert sorted(one.reward for one in group.episodes) == expected
        while service.external._running:
            await asyncio.sleep(0.01)
        await service.external.aclose()
        recorded = {one.episode_id: one for one in service.ended}
        assert len(service.ended) == len(recorded) == 3
        last = recorded[alone["episode_id"]]
        assert (last.status, last.reward) == (EpisodeStatus.CANCELLED, None) and last.failure is not None
        assert last.failure.message.endswith("not judged" if judge is ByStars else "its reward was 1")

    play(scene, monkeypatch, judge)


class Undecided(BaseJudge):
    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Later:
        return Later()


def test_what_ends_the_run_reaches_training_however_late_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        for _ in range(2):
            await service.end(await service.begin())
        while service.external._running:
            await asyncio.sleep(0.01)
        with pytest.raises(ConfigError, match="Undecided returned Later"):
            await service.external.next_groups(1, step=1)

    play(scene, monkeypatch, Undecided)


def test_what_never_ends_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        episode = await service.begin()
        assert episode["deadline"] == 0.2
        while not service.ended:
            await asyncio.sleep(0.01)
        assert service.ended[0].status is EpisodeStatus.TIMEOUT
        assert (await service.end(episode, reward=1)).status_code == 409

    play(scene, monkeypatch, rollout__episode_timeout=0.2)


def test_as_many_as_the_pool_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        episodes = [await service.begin() for _ in range(3)]
        reply = await service.post("episodes", KEY)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        await service.end(episodes[0], reward=1)
        while not service.ended:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        await service.begin()

    play(scene, monkeypatch, rollout__max_env_worker=3)


def test_a_program_that_leaves_before_it_has_a_key_leaves_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the tokenizer less long than that takes, and asks again."""

    async def scene(service: Service) -> None:
        loaded = asyncio.Event()
        sessions = service.external._attempts.sessions
        open_session = sessions.open_session

        async def slowly(attempt: WorkflowAttempt) -> Any:
            await loaded.wait()
            return await open_session(attempt)

        monkeypatch.setattr(sessions, "open_session", slowly)
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                await service.http.post(
                    f"{service.base_url}/episodes", json={}, headers={"authorization": f"Bearer {KEY}"}, timeout=0.1
                )
        loaded.set()
        assert (await service.end(await service.begin(), reward=1)).status_code == 200
        while service.external._running:
            await asyncio.sleep(0.01)
        assert [one.reward for one in service.ended] == [1.0]

    play(scene, monkeypatch)


def test_an_episode_ends_once_whoever_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        episode = await service.begin()
        replies = await asyncio.gather(*(service.end(episode, reward=reward) for reward in range(8)))
        assert sorted(reply.status_code for reply in replies) == [200] + [409] * 7
        (first,) = [reward for reward, reply in enumerate(replies) if reply.status_code == 200]
        assert "is over" in (await service.end(episode, reward=9)).json()["error"]["message"]
        while not service.ended:
            await asyncio.sleep(0.01)
        assert service.ended[0].reward == first

    play(scene, monkeypatch)


@pytest.mark.parametrize("body", [b'{"reward": NaN}', b'{"reward": 1e999}', b'{"reward": ' + b"9" * 400 + b"}", b"[1]"])
def test_a_reward_that_is_no_number_ends_nothing(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    async def scene(service: Service) -> None:
        episode = await service.begin()
        path = f"{service.base_url}/episodes/{episode['episode_id']}/end"
        headers = {"authorization": f"Bearer {episode['control_key']}"}
        assert (await service.http.post(path, content=body, headers=headers)).status_code == 400
        assert (await service.end(episode, reward=1)).status_code == 200

    play(scene, monkeypatch)


def test_long_task_ids_are_refused_and_not_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        reply = await service.post("episodes", KEY, {"task": {"task_id": "x" * 201}})
        assert (reply.status_code, "task.task_id: 201 characters, at most 200" in reply.text) == (400, True)
        await service.begin(task_id="x" * 200)

    play(scene, monkeypatch)


@pytest.mark.parametrize("usable", [True, False])
def test_who_waits_for_groups_in_vain_hears_why(
    usable: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ajet.task_runner.external_episodes.PATIENCE_GROUPS", 2)

    async def scene(service: Service) -> None:
        for number in range(4):
            outcome: dict[str, Any] = {"reward": 1} if usable else {"failure": "the user left"}
            await service.end(await service.begin(task_id=f"chat-{number}" if usable else "chat"), **outcome)
        while len(service.ended) < 4:
            await asyncio.sleep(0.01)

    play(scene, monkeypatch)
    (said,) = [record.getMessage() for record in caplog.records if "no group of 2" in record.getMessage()]
    assert said.startswith("4 episodes have ended")
    assert ("4 task ids" if usable else "none was usable; the last: OutsideFailure: the user left") in said


def test_a_stale_group_is_recorded_and_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service) -> None:
        monkeypatch.setattr(
            "ajet.task_runner.external_episodes._age", lambda episode, step: step if episode.reward == 0 else 0
        )
        for task, reward in (("old", 0), ("old", 0), ("new", 1), ("new", 2)):
            await service.end(await service.begin(task_id=task), reward=reward)
        old, new = await service.external.next_groups(1, step=9)
        assert (old.complete, len(old.episodes), len(old.failed)) == (False, 0, 2)
        assert {one.failure.kind for one in old.failed if one.failure} == {"EpisodeStale"}
        assert all(one.failure.message.endswith("; its reward was 0") for one in old.failed if one.failure)
        assert new.complete and [one.reward for one in new.episodes] == [1.0, 2.0]

    play(scene, monkeypatch)


@pytest.mark.parametrize("key", [None, "", "short", "with a space in it", "ключ-ключ-ключ-ключ"])
def test_without_a_key_nothing_begins(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        service_key()


def test_other_backbones_refuse_by_name() -> None:
    for backbone in ("debug", "verl", "trinity"):
        keys = {"task_runner.wrapper_type": "outside", "trainer_common.total_training_steps": 1}
        ajet = make_config(keys).ajet.model_copy(update={"backbone": backbone})
        assert any(backbone in found.what for found in contradictions(ajet, backbone))  # type: ignore[arg-type]
