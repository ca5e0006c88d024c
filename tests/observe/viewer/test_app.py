"""The viewer's pages: who may see them, what every answer forbids, and what a bad URL gets."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ajet.backbone.metrics import episode_metrics
from ajet.observe.recorder import EpisodeRecorder
from ajet.observe.viewer.library import Experiment, Library
from ajet.observe.viewer.pages import Access
from ajet.observe.viewer.serve import create_app
from ajet.schema.task import Task
from support.pages_of_viewer import signed_in
from support.synthetic_run import Vocabulary, math_episode

LOCAL = "http://127.0.0.1"


def client(root: Path, access: Access, base: str = LOCAL) -> TestClient:
    return TestClient(create_app(Library(root), access), base_url=base, follow_redirects=False)


def test_a_link_without_cookie_leads_through_the_login_back_to_it(experiments: Path) -> None:
    access = Access(password="long enough", hosts=())
    visitor = client(experiments, access, "http://machine:8642")
    answer = visitor.get("/x/math-agent/episodes?status=timeout")
    assert answer.headers["location"] == "/login?next=%2Fx%2Fmath-agent%2Fepisodes%3Fstatus%3Dtimeout"
    wanted = "/x/math-agent/episodes?status=timeout"
    again = visitor.post("/login", data={"secret": "wrong", "next": wanted})
    assert again.status_code == 401 and f'name="next" value="{wanted}"' in again.text, "where to is kept"
    assert visitor.post("/login", data={"secret": "long enough", "next": wanted}).headers["location"] == wanted
    assert visitor.get(wanted).status_code == 200


def test_a_run_is_shown_under_the_name_of_its_folder_or_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, runs = tmp_path / "elsewhere" / "run-7", tmp_path / "runs"
    (run / "code").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    runs.mkdir()
    (runs / "newest").symlink_to(run)
    library = Library(runs)
    assert library.names() == ["newest"] and library.get("newest").summary()["name"] == "newest"
    for place, root in ((run, "."), (run / "code", "..")):
        monkeypatch.chdir(place)
        library = Library(Path(root))
        assert library.names() == ["run-7"] and library.get("run-7").name == "run-7"


def test_metrics_of_a_run_with_any_name_can_be_downloaded(tmp_path: Path) -> None:
    for name in ("math agent", "数学"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "return/mean": 0.5}\n')
    visitor = signed_in(tmp_path)
    for name, said in (("math agent", 'filename="math_agent_metrics.csv"'), ("数学", "filename*=UTF-8''%E6%95%B0")):
        answer = visitor.get(f"/api/x/{name}/metrics.csv")
        assert answer.text.splitlines() == ["step,return/mean", "1,0.5"]
        assert said in answer.headers["content-disposition"]


def test_separators_of_lines_within_a_message_lose_no_line_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(json.dumps({"message": "one\u2028two\x85"}, ensure_ascii=False) + "\n")
    assert Experiment(tmp_path).log_tail() == [{"message": "one\u2028two\x85"}]


def test_every_answer_forbids_scripts_from_elsewhere(experiments: Path) -> None:
    visitor = signed_in(experiments)
    paths = ("/", "/x/math-agent", "/x/nothing", "/api/experiments", "/static/run.js", "/static/none", "/login")
    for path in paths:
        headers = visitor.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_no_way_out_of_the_folder(experiments: Path) -> None:
    visitor = signed_in(experiments)
    for path in ("/x/%2e%2e/about", "/api/x/%2e%2e%2f/metrics", "/static/../app.py", "/static/%2e%2e/app.py"):
        assert visitor.get(path).status_code in (303, 404), path


def test_bad_queries_say_what_is_wrong(experiments: Path) -> None:
    visitor = signed_in(experiments)
    for query in ("step_min=x", "sort=reward;drop", "success=maybe", "reward_max=nan", "offset=1e400"):
        answer = visitor.get(f"/api/x/math-agent/episodes?{query}")
        assert answer.status_code == 400 and query.split("=")[0] in answer.json()["error"]
    for query in ("from=--5", "to=x", "from=" + "9" * 400, "smooth=1", "smooth=nan"):
        answer = visitor.get(f"/api/x/math-agent/metrics?{query}")
        assert answer.status_code == 400 and query.split("=")[0] in answer.json()["error"]
    for query in ("", "from=-1", "to=3", "smooth=0.5", "name=nothing"):
        assert visitor.get(f"/api/x/math-agent/metrics?{query}").status_code == 200
    assert visitor.get("/api/x/math-agent/episodes?groups=some").status_code == 400
    assert visitor.get("/api/x/math-agent/episode/none").status_code == 404
    assert visitor.get("/x/none").status_code == 404


def test_success_is_what_the_metrics_count(tmp_path: Path) -> None:
    """A workflow may give a reward alone: from the run's threshold on, that is a success."""
    run = tmp_path / "quiet"
    run.mkdir()
    (run / "config.resolved.yaml").write_text("ajet: {task_judge: {success_threshold: 0.5}}\n")
    vocabulary, rng = Vocabulary(), random.Random(0)
    episodes = [math_episode(vocabulary, rng, repeat=repeat) for repeat in range(5)]
    given = ((0.5, None), (0.25, None), (None, None), (0.0, True), (1.0, False))
    recorder = EpisodeRecorder(run / "episodes.sqlite", tokenizer=vocabulary)
    for episode, (reward, success) in zip(episodes, given, strict=True):
        episode.reward, episode.is_success = reward, success
        recorder.record(episode, 1)
    recorder.close()
    visitor = signed_in(tmp_path)
    found = {
        said: {row["repeat"] for row in visitor.get(f"/api/x/quiet/episodes?success={said}").json()["rows"]}
        for said in ("yes", "no")
    }
    assert found == {"yes": {0, 3}, "no": {1, 2, 4}}
    shown = [visitor.get(f"/api/x/quiet/episode/{one.episode_id}").json()["episode"]["success"] for one in episodes]
    assert shown == [True, False, None, True, False]
    metrics = episode_metrics(episodes, success_threshold=0.5)
    assert metrics["success/rate"] == 2 / 4


def test_a_page_that_is_not_there_leads_back(experiments: Path) -> None:
    visitor = signed_in(experiments)
    missing = visitor.get("/x/math-agent/nonsense")
    assert missing.status_code == 404 and "There is no such page" in missing.text
    assert 'href="/x/math-agent">Back to math-agent' in missing.text and 'href="/"' in missing.text
    assert "no experiment &#39;none&#39;" in visitor.get("/x/none").text


@pytest.mark.parametrize(
    "host", ["x/static/?", "x/login?", "127.0.0.1/static/#", "x/static/..", "[::1]/static/?", "@/static/"]
)
def test_the_host_header_opens_no_door(experiments: Path, host: str) -> None:
    for hosts in ((), ("127.0.0.1",)):
        visitor = client(experiments, Access(password="long enough", hosts=hosts), "http://127.0.0.1")
        for path in ("/", "/api/experiments", "/x/math-agent/episodes"):
            answer = visitor.get(path, headers={"host": host})
            assert answer.status_code in (303, 400, 401, 421), (hosts, path)
            assert "math-agent" not in answer.text


def test_runs_that_were_scored_differently_are_compared_with_a_warning(tmp_path: Path) -> None:
    for name, judge in (("a", "MathAnswerAsJudge (exact rules alone)"), ("b", "Mine"), ("c", "Mine")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
        (tmp_path / name / "environment.json").write_text(json.dumps({"judge": judge}))
    visitor = signed_in(tmp_path)
    assert "scored differently" in (page := visitor.get("/compare?runs=a,b").text) and "exact rules alone" in page
    assert "scored differently" not in visitor.get("/compare?runs=b,c").text


def test_numbers_that_a_browser_would_round_are_shown_in_full(tmp_path: Path) -> None:
    (tmp_path / "sums").mkdir()
    episode = math_episode(Vocabulary(), random.Random(0))
    episode.metadata = {"said": [2**53 - 1, 2**53 + 1]}
    recorder = EpisodeRecorder(tmp_path / "sums" / "episodes.sqlite")
    task = Task(task_id=episode.task_id, main_query="?", metadata={"answer": 3**90})
    assert recorder.record(episode, 1, task=task).result()
    recorder.close()
    visitor = signed_in(tmp_path)
    shown = visitor.get(f"/api/x/sums/episode/{episode.episode_id}").json()["episode"]
    assert shown["metadata"] == {"said": [2**53 - 1, str(2**53 + 1)]}
    (row,) = visitor.get("/api/x/sums/tasks").json()["rows"]
    one = visitor.get(f"/api/x/sums/task/{episode.task_id}").json()["task"]
    assert row["answer"] == one["answer"] == one["metadata"]["answer"] == str(3**90)


def test_how_the_judge_graded_is_shown(tmp_path: Path) -> None:
    """Its rubrics under *About*, and the parts of a reward with the episode and as curves."""
    folder = tmp_path / "graded"
    (folder / "cache").mkdir(parents=True)
    (folder / "cache" / "rubrics.yaml").write_text("rubrics:\n- <b>Be right.</b>\n")
    episode = math_episode(Vocabulary(), random.Random(0))
    episode.reward_parts, episode.reward_weights = {"correct": 1.0, "style": 0.5}, {"style": 0.3}
    recorder = EpisodeRecorder(folder / "episodes.sqlite")
    recorder.record(episode, 1)
    recorder.close()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **episode_metrics([episode])}) + "\n")
    visitor = signed_in(tmp_path)
    about = visitor.get("/x/graded/about").text
    assert "Rubrics of the judge" in about and "&lt;b&gt;Be right." in about and "<b>Be right" not in about
    shown = visitor.get(f"/api/x/graded/episode/{episode.episode_id}").json()["episode"]
    assert shown["reward_parts"] == {"correct": 1.0, "style": 0.5} and shown["reward_weights"] == {"style": 0.3}
    columns = visitor.get("/api/x/graded/metrics?name=reward/correct&name=reward/style").json()["series"]
    assert columns["reward/correct"] == [1.0] and columns["reward/style"] == [0.5]
