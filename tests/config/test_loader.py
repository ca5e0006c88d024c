"""`load_config`: layers, short keys, the user's own blocks, files, and what existing files carry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ajet.config import Config, load_config
from ajet.config.effects import notes
from ajet.config.interpolation import literal
from ajet.schema.errors import ConfigError

MINIMAL = """
ajet:
  rollout:
    user_workflow: flow.py->Flow
  task_reader:
    type: random_dummy
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "flow.py").write_text("class Flow: pass")
    (tmp_path / "tasks.jsonl").write_text('{"query": "a"}')
    return tmp_path


def load(folder: Path, text: str = "", *overrides: str) -> Config:
    """A minimal file with `text` below it."""
    file = folder / "experiment.yaml"
    file.write_text(MINIMAL + text)
    return load_config(file, overrides)


def refused(folder: Path, text: str = "", *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


def test_defaults_yaml_and_overrides_are_layered(folder: Path) -> None:
    config = load(
        folder, "  data:\n    train_batch_size: 8\n", "ajet.rollout.num_repeat=6", "data.max_prompt_length=100"
    )
    assert config.ajet.data.train_batch_size == 8
    assert config.ajet.rollout.num_repeat == 6
    assert config.ajet.data.max_prompt_length == 100
    assert config.ajet.data.max_response_length == 15000
    assert config.ajet.experiment_name == "experiment"
    assert config.experiment_path == Path("saved_experiments/experiment")
    assert config.yaml_path == folder / "experiment.yaml"


@pytest.mark.parametrize("name", [".", "..", "../../elsewhere", "/absolute", "group/run"])
def test_a_run_is_where_runs_are_listed(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="should be a name without /"):
        load(folder, "", f"experiment_name={name}")
    assert load(folder, "", "experiment_name=run.1").ajet.experiment_name == "run.1"


def test_the_name_of_a_run_is_no_flag(folder: Path) -> None:
    """`ajet view -x` would be read as one."""
    with pytest.raises(ConfigError, match="should be a name that does not begin with -, as flags do"):
        load(folder, "", "experiment_name=-x")


def test_keys_below_a_name_of_the_users_own(folder: Path) -> None:
    part = "  task_judge:\n    judge_type: composite\n    parts:\n      style: {judge: llm_judge, weigt: 0.3}\n"
    said = refused(folder, part)
    assert "experiment.yaml:10: ajet.task_judge.parts.style.weigt: unknown key" in said
    assert "did you mean `ajet.task_judge.parts.style.weight`?" in said
    deeper = refused(folder, "", "task_judge.parts.style.llm_judge.promt=x")
    assert "did you mean `ajet.task_judge.parts.style.llm_judge.prompt`?" in deeper
    assert "its keys: command, folder, address" in refused(folder, "", "services.world.zzzz=1")


def test_own_blocks_read_like_omegaconf(folder: Path) -> None:
    text = "  user: {note: {deep: 1}}\nfrozen_lake:\n  size: 4\n  maps: [{name: small}]\n  2: two\n"
    config = load(folder, text, "frozen_lake.size=5", "+puzzle.kind=sudoku")
    assert config.frozen_lake.size == config["frozen_lake"]["size"] == 5
    assert config.frozen_lake.maps[0].name == "small"
    assert config.frozen_lake[2] == "two"
    assert config.puzzle.kind == "sudoku"
    assert config.ajet.user.note.deep == 1
    assert config.frozen_lake.get("no", 7) == 7
    assert config.ajet.rollout["temperature"] == config.ajet.rollout.get("temperature") == 0.9
    assert config.ajet.get("no_such_key") is None
    with pytest.raises(AttributeError, match=r"no key 'sise'.*size, maps"):
        _ = config.frozen_lake.sise


def test_backbone_blocks_pass_through(folder: Path) -> None:
    text = "verl:\n  actor: {lr: 1e-6}\ntrainer: {n: 1}\ntrinity: {mode: both}\n"
    config = load(folder, text, "verl.actor.x=[1, 2]", "ajet.verl.y=3")
    assert config.verl == {"actor": {"lr": 1e-6, "x": [1, 2]}}
    assert (config.trainer, config.trinity, config.ajet.verl) == ({"n": 1}, {"mode": "both"}, {"y": 3})


def test_interpolation_sees_yaml_environment_defaults_and_overrides(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH", "12")
    text = """
  data:
    train_batch_size: ${oc.env:BATCH}
    max_prompt_length: ${mine.half}
  project_name: p-${ajet.rollout.num_repeat}-${ajet.experiment_name}
  debug:
    debug_max_parallel: ${.debug_first_n_tasks}
    debug_first_n_tasks: ${oc.env:NOT_SET_ANYWHERE,3}
mine: {half: 1500, other: "${ajet.data}"}
"""
    config = load(folder, text, "rollout.num_repeat=7")
    assert config.ajet.data.train_batch_size == 12
    assert config.ajet.data.max_prompt_length == 1500
    assert config.ajet.project_name == "p-7-experiment"
    assert config.ajet.debug.debug_max_parallel == 3
    assert config.mine.other.train_batch_size == "12"


@pytest.mark.parametrize("plain", ["${...}", "${.}", "${mine} and ${mine.a}"])
def test_an_escaped_interpolation_refers_to_nothing(folder: Path, plain: str) -> None:
    config = load(folder, f"mine:\n  a: '{literal(plain)} ${{oc.env:NOT_SET_ANYWHERE,3}}'\n")
    assert config.mine == {"a": f"{plain} 3"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine:\n  a: ${mine}\n", ":8: mine.a: the interpolation refers to itself"),
        ("".join(f"a{n}: ${{a{n + 1}}}\n" for n in range(5000)) + "a5000: 1\n", "one interpolation refers to the next"),
    ],
)
def test_interpolations_without_end_are_refused(folder: Path, text: str, says: str) -> None:
    assert says in refused(folder, text)


def test_files_are_found_from_the_working_directory_or_the_yaml(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(folder).ajet.rollout.user_workflow == f"{folder}/flow.py->Flow"
    (elsewhere / "flow.py").write_text("")
    assert load(folder).ajet.rollout.user_workflow == f"{elsewhere}/flow.py->Flow"
    reader = "task_reader.jsonl_dataset_file.training.file_path=tasks.jsonl"
    config = load(folder, "", "task_reader.type=jsonl_dataset_file", reader)
    assert config.ajet.task_reader.jsonl_dataset_file.training.file_path == f"{folder}/tasks.jsonl"
    teacher = "trainer_common.algorithm.distillation.teacher"
    assert f"{teacher}: no file or folder './big'" in refused(folder, "", f"{teacher}=./big")
    (folder / "big").mkdir()
    assert "holds no config.json" in refused(folder, "", f"{teacher}=./big")
    (folder / "big" / "config.json").write_text("{}")
    assert load(folder, "", f"{teacher}=./big").ajet.trainer_common.algorithm.distillation.teacher == f"{folder}/big"


def test_existing_files_load_and_are_told_what_has_no_effect(folder: Path) -> None:
    text = """
  context_tracker:
    timeline_merging_policy: {timeline_compare_level: text, ignore_tools: true}
    fix_retokenization_drift: false
  enable_experimental_interchange_server: true
  interchange_server: {interchange_method: tcp, interchange_server_port: auto, num_fastapi_process: 2}
  judge: {anything: [1, 2]}
  debug:
hydra:
  searchpath: [file://x]
defaults:
  - verl_default
  - _self_
"""
    overrides = ("rollout.mode=async", "rollout.name=vllm", "rollout.agent_madness_reward=-0.5", "ajet.backbone=debug")
    config = load(folder, text, *overrides, "trainer_common.optim.lr=1")
    assert config.ajet.failure_reward.abnormal == -0.5
    ignored, old, renamed, elsewhere = notes(config)
    assert ignored == "ignored: hydra:, defaults: (a config is complete without)"
    assert old == (
        "old keys that nothing reads: "
        "context_tracker.fix_retokenization_drift, context_tracker.timeline_merging_policy, "
        "enable_experimental_interchange_server, interchange_server, rollout.mode "
        "(sampled token ids are kept as sampled; conversations are always merged exactly, token by token; "
        "the gateway is always available; model calls are always asynchronous)"
    )
    assert renamed == (
        "old keys: rollout.agent_madness_reward is now failure_reward.abnormal, rollout.name is now rollout.engine"
    )
    assert elsewhere == "without effect on debug and the vllm engine: trainer_common.optim.lr"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["trainer_common.n_gpus_per_node=8", "ajet.backbone=local"], "trainer_common.n_gpus_per_node"),
        (["rollout.vllm.sleep=true"], "rollout.vllm.sleep"),
        (["rollout.remote.model=x", "rollout.engine=sglang", "ajet.backbone=debug"], ""),
        (["rollout.kv_cache_gb=1", "ajet.backbone=verl"], "rollout.kv_cache_gb"),
        (["rollout.max_staleness=1", "ajet.backbone=verl"], "rollout.max_staleness"),
        (["rollout.weights_folder=/tmp", "ajet.backbone=debug"], "rollout.weights_folder"),
        (["rollout.tensor_model_parallel_size=2", "ajet.backbone=verl"], ""),
        (["trainer_common.logger=console", "trainer_common.seed=1", "ajet.backbone=debug"], "trainer_common.seed"),
        (["ajet.verl.x=1", "ajet.trinity.y=1", "debug.debug_first_n_tasks=1", "ajet.backbone=trinity"], ""),
    ],
)
def test_keys_without_effect_here_are_named(folder: Path, overrides: list[str], named: str) -> None:
    found = [note.partition(": ")[2] for note in notes(load(folder, "", *overrides))]
    assert found == ([named] if named else [])


@pytest.mark.parametrize(
    ("override", "switch"),
    [
        ("trainer_common.algorithm.distillation.coef=2", "trainer_common.algorithm.distillation.teacher=tiny:"),
        ("trainer_common.algorithm.overlong.penalty=2", "trainer_common.algorithm.overlong.buffer=8"),
        ("trainer_common.algorithm.pass_k=2", "trainer_common.algorithm.adv_estimator=pass_at_k"),
        ("trainer_common.algorithm.replay.max_age=2", "trainer_common.algorithm.replay.groups=1"),
        ("trainer_common.algorithm.sft.min_reward=2", "trainer_common.algorithm.policy_loss=sft"),
        ("trainer_common.algorithm.state_weight=2", "trainer_common.algorithm.baseline=state"),
        ("trainer_common.optim.min_lr_ratio=0.1", "trainer_common.optim.lr_scheduler_type=cosine"),
        ("model.lora.rank=8", "model.lora.enabled=true"),
        ("rollout.oversample_keep=first_ended", "rollout.enable_oversample=true"),
    ],
)
def test_keys_that_another_switches_off_are_named(folder: Path, override: str, switch: str) -> None:
    (note,) = notes(load(folder, "", override))
    assert note.startswith(f"without effect while {switch.partition('=')[0]} is ")
    assert note.endswith(f": {override.partition('=')[0]}")
    assert not list(notes(load(folder, "", override, switch)))


def test_a_validation_temperature_that_is_not_used_is_named(folder: Path) -> None:
    (note,) = notes(load(folder, "", "rollout.val_kwargs.temperature=0.5"))
    assert "validation is greedy" in note
    assert not list(notes(load(folder, "", "rollout.val_kwargs={temperature: 0.5, do_sample: true}")))


@pytest.mark.parametrize("asked", ["{do_sample: false}", "{temperature: 0}"])
def test_samples_that_a_greedy_validation_does_not_draw_are_named(folder: Path, asked: str) -> None:
    (note,) = notes(load(folder, "", "trainer_common.val_pass_n=8", f"rollout.val_kwargs={asked}"))
    assert note.startswith("trainer_common.val_pass_n 8 has no effect")
    assert not list(notes(load(folder, "", "trainer_common.val_pass_n=8")))


def test_an_optimiser_key_of_another_program_is_refused(folder: Path) -> None:
    message = refused(folder, "", "trainer_common.optim.learning_rate=1e-4")
    assert "ajet.trainer_common.optim.learning_rate: unknown key" in message
    assert "the keys of `ajet.trainer_common.optim`: lr, " in message
    assert "below `verl.actor_rollout_ref.actor.optim`, Trinity's below `trinity.algorithm.optimizer`" in message
    assert "did you mean `ajet.trainer_common.optim.betas`?" in refused(folder, "", "trainer_common.optim.beta=[1, 1]")
    for key in ("rollout.vllm.gpu_memory=1", "trainer_common.fsdp_config.offload=true"):
        assert "did you mean" in refused(folder, "", key)


def test_former_names_of_keys_still_mean_something(folder: Path) -> None:
    former = ("rollout.name=vllm", "rollout.agent_madness_reward=-0.5", "trainer_common.logger=swanlab")
    config = load(folder, "", *former, "ajet.backbone=verl")
    assert config.ajet.rollout.engine == "vllm"
    assert config.ajet.failure_reward.abnormal == -0.5
    assert config.ajet.trainer_common.logger == ["swanlab"]
    both = load(folder, "", "rollout.name=vllm", "rollout.engine=torch", "failure_reward.abnormal=drop")
    assert (both.ajet.rollout.engine, both.ajet.failure_reward.abnormal) == ("torch", "drop")


@pytest.mark.parametrize("text", ["0x_", "0o_", "-0b__"])
def test_a_prefix_without_digits_is_text(folder: Path, text: str) -> None:
    assert load(folder, "", f"user.x={text}").ajet.user.x == text


def test_yaml_features_that_are_allowed(folder: Path) -> None:
    text = """
base: &base {a: 1, b: 2}
child:
  <<: *base
  b: 3
text: !!str 12
multi: |
  line one
  line two
numbers: [1e-6, 0x10, 1_000, .5, -.inf, 010, 2026-01-01, 1:30]
words: ['yes', yes, ~, "a: b"]
"""
    config = load(folder, text)
    assert config.child == {"a": 1, "b": 3}
    assert config.text == "12"
    assert config.multi == "line one\nline two\n"
    assert config.numbers == [1e-6, 16, 1000, 0.5, float("-inf"), "010", "2026-01-01", "1:30"]
    assert config.words == ["yes", True, None, "a: b"]


def test_short_keys_that_lead_nowhere(folder: Path) -> None:
    assert "`num_repeat` belongs in `ajet.rollout`" in refused(folder, "", "num_repeat=3")
    assert "did you mean `rollout.num_repeat`?" in refused(folder, "", "rollot.num_repeat=3")
    assert "did you mean `frozen_lake.size`?" in refused(folder, "frozen_lake: {}\n", "frozen_lak.size=3")
    assert "command line (rollout.num_repeat=x): ajet.rollout.num_repeat: 'x' is not allowed" in refused(
        folder, "", "rollout.num_repeat=x"
    )
    assert "expected text\n" in refused(folder, "", "services.w.command=false") + "\n", "its default is nothing to name"
    assert "has no keys under it" in refused(folder, "", "rollout.user_workflow.x=3")
    assert "tags are not allowed" in refused(folder, "", "model.path=!!python/name:os.system")


def test_all_problems_are_said_at_once_in_the_files_order(folder: Path) -> None:
    message = refused(
        folder, "  modell: {path: x}\n  trainer_common:\n    save_freq: true\n    optim: {clip_grad: 0}\n"
    )
    places = [line for line in message.splitlines() if line.startswith("experiment.yaml:")]
    assert [place.split(": ")[1] for place in places] == [
        "ajet.modell",
        "ajet.trainer_common.save_freq",
        "ajet.trainer_common.optim.clip_grad",
    ]
    assert "experiment.yaml:7: ajet.modell: unknown key\n    did you mean `ajet.model`?" in message
    assert "expected a number (above 0); default: 1.0" in message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("prompt_tuning.templates={a: {text: x, modle: 1}}", "ajet.prompt_tuning.templates.a.modle: unknown key"),
        ("prompt_tuning.templates={a: {text: x, modle: 1}}", "its keys: text, file, engine"),
        ("prompt_tuning.templates={a: {text: x, engine: y}}", "templates.a.engine: 'y' is not allowed"),
        ("prompt_tuning.templates={a: {text: x, file: y}}", "should have either `text` or `file`"),
        ("task_judge.parts={a b: {judge: tests}}", "ajet.task_judge.parts.a b: can't be a name here"),
        ("task_judge.parts={5: {judge: tests}}", "ajet.task_judge.parts.5: can't be a name here"),
        ("rollout.sandbox=bubblewra", "did you mean `bubblewrap`?"),
        ("task_reader.jsonl_dataset_file=x.jsonl", "expected a group of keys (training, validation)"),
        ("trainer_common.kl_loss_type=full", "'full' is not allowed"),
        ("trainer_common.logger=5", "`path/file.py->YourSink` or a list of them"),
        ("prompt_tuning.gepa.perfect_score=.nan", "nan is not allowed"),
        ("model.lora.alpha=1.5", "expected a whole number (at least 1); default: 32"),
        ("model.path=~nobody-of-this-name/model", "no file or folder '~nobody-of-this-name/model'"),
        ("rollout.user_workflow=~nobody-of-this-name/a.py->A", "no file 'a.py' in"),
    ],
)
def test_what_is_wrong_with_one_of_several_forms_is_said(folder: Path, override: str, says: str) -> None:
    message = refused(folder, "", override)
    assert says in message
    assert len([line for line in message.splitlines() if line.startswith("command line")]) == 1


@pytest.mark.parametrize("more", ["", "  user: {x: '${oc.env:HOME}'}\n"])
def test_a_block_with_a_number_for_a_name_is_refused(folder: Path, more: str) -> None:
    assert ": 5: can't be a name here" in refused(folder, f"{more}5: {{a: 1}}\n")


def test_a_tool_without_a_name_contradicts_nothing(folder: Path) -> None:
    assert load(folder, "", "rollout.user_workflow=null", "rollout.agent={tools: [{}]}").ajet.rollout.agent is not None


def test_a_group_at_the_top_by_mistake(folder: Path) -> None:
    assert "it belongs under `ajet:`" in refused(folder, "data:\n  train_batch_size: 3\n")
    assert load(folder, "data: {mine: 1}\n").data.mine == 1
    for text, says in (
        ("ajett:\n  data: {}\n", "did you mean `ajet:`"),
        ("rollout:\n  num_repeat: 2\n", "put `ajet:` above it"),
        ("mine: 1\n", "there is no `ajet:` block"),
    ):
        (folder / "top.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_config(folder / "top.yaml")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.max_prompt_length=9999"], "is more than rollout.max_model_len (18000)"),
        (["rollout.min_group_size=5"], "never reaches min_group_size = 5"),
        (["trainer_common.mini_batch_num=33"], "lower mini_batch_num to 32"),
        (["rollout.num_repeat=1"], "nothing would be learnt"),
        (["rollout.temperature=0"], "nothing would be learnt"),
        (["rollout.engine=remote"], "the local backbone can't train"),
        (["rollout.engine=scripted"], "or use --backbone=debug, which doesn't train"),
        (["rollout.engine=remote", "ajet.backbone=verl"], "the verl backbone can't train"),
        (["rollout.deterministic=true", "rollout.engine=vllm"], "only the embedded engine"),
        (["rollout.max_staleness=1"], "or max_staleness: 0"),
        (["rollout.max_staleness=1", "rollout.engine=vllm", "rollout.vllm.sleep=true"], "leave rollout.vllm.sleep out"),
        (
            [
                "rollout.max_staleness=1",
                "rollout.engine=vllm",
                "trainer_common.algorithm.rollout_correction.mode=none",
            ],
            "tokens of earlier versions would count",
        ),
        (
            ["rollout.max_staleness=1", "rollout.engine=vllm", "trainer_common.algorithm.use_kl_in_reward=true"],
            "set use_kl_in_reward: false",
        ),
        (["model.lora.enabled=true", "rollout.engine=sglang"], "or train whole weights"),
        (["rollout.vllm.devices=[0,0,1]", "rollout.engine=vllm", "rollout.n_vllm_engine=2"], "name each GPU once"),
        (["rollout.vllm.devices=[1]", "rollout.engine=vllm", "rollout.n_vllm_engine=2"], "name 2 GPUs"),
        (
            [
                "rollout.vllm.sleep=true",
                "rollout.engine=vllm",
                "rollout.vllm.devices=[1]",
                "trainer_common.gpu=0",
            ],
            "a trainer that works elsewhere",
        ),
        (
            ["trainer_common.optim.lr_warmup_ratio=0.1", "trainer_common.optim.lr_warmup_steps=3"],
            "the warm-up has two lengths",
        ),
        (["rollout.enable_oversample=true", "rollout.deterministic=true"], "doesn't repeat bit for bit"),
        (["trainer_common.kl_reference_sync=5", "model.lora.enabled=true"], "or train whole weights"),
        (["trainer_common.kl_adaptive.target=0.1", "trainer_common.use_kl_loss=false"], "and there is none"),
        (
            ["trainer_common.algorithm.distillation.teacher=http://127.0.0.1:9/v1", "rollout.temperature=0.7"],
            "log-probabilities of temperature 1",
        ),
        (
            ["trainer_common.algorithm.distillation.teacher=big", "trainer_common.algorithm.policy_loss=sft"],
            "set policy_loss: ppo",
        ),
        (["trainer_common.algorithm.rollout_correction.low=9"], "swap them"),
        (["rollout.temperature=1e-6"], "nothing would be learnt"),
        (["helper.base_url=http://127.0.0.1:9/v1"], "ajet.helper.base_url: helper has an endpoint but no model"),
        (["helper.max_cost=5", "helper.model=big"], "ajet.helper.max_cost: helper.max_cost needs prices"),
    ],
)
def test_contradictions_are_blamed_on_what_was_written(folder: Path, overrides: list[str], says: str) -> None:
    message = refused(folder, "", *overrides)
    assert says in message
    assert message.startswith(f"command line ({overrides[0]}): ajet.")


def test_a_debug_run_may_do_what_training_may_not(folder: Path) -> None:
    assert load(folder, "", "rollout.num_repeat=1", "ajet.backbone=debug").ajet.rollout.num_repeat == 1


def test_an_incomplete_file_says_what_is_needed(folder: Path) -> None:
    (folder / "bare.yaml").write_text("ajet:\n")
    with pytest.raises(ConfigError, match=r"user_workflow: is needed[\s\S]*file_path: is needed"):
        load_config(folder / "bare.yaml")
    assert load_config(folder / "bare.yaml", complete=False).ajet.rollout.num_repeat == 4


@pytest.mark.slow
def test_loading_imports_nothing_heavy_and_no_user_code(folder: Path) -> None:
    load(folder, "mine: ${ajet.rollout.num_repeat}\n")
    (folder / "flow.py").write_text("raise SystemExit('the workflow was imported')")
    program = (
        "import sys; from ajet.config import load_config; load_config(sys.argv[1]);"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(folder / "experiment.yaml")], capture_output=True, text=True, check=True
    )
    heavy = {"torch", "transformers", "ray", "datasets", "starlette", "openai", "numpy", "agentscope"}
    assert not heavy & set(ran.stdout.split())


def test_a_file_with_every_key_that_existing_users_have_loads() -> None:
    config = load_config(Path(__file__).parent / "existing.yaml")
    assert config.ajet.experiment_name == "existing"
    assert config.ajet.rollout.engine == "vllm"
    assert config.ajet.trainer_common.optim.lr == 1e-6
    assert config.ajet.trainer_common.logger == ["swanlab"]
    assert config.ajet.task_reader.data_generation.deduplication_filter.params.similarity_threshold == 0.8
    assert config.frozen_lake.frozen_lake_size == 4
    assert config.verl.actor_rollout_ref.rollout.free_cache_engine is True
    assert Config.model_validate(config.model_dump()).ajet == config.ajet
    assert Config.model_validate_json(config.model_dump_json()).ajet == config.ajet


def test_every_default_loads_and_contradicts_nothing(folder: Path) -> None:
    """What `ajet config show` prints can be run."""
    import yaml

    defaults = Config().model_dump(mode="json")
    defaults["ajet"]["rollout"]["user_workflow"] = "flow.py->Flow"
    defaults["ajet"]["task_reader"]["type"] = "random_dummy"
    (folder / "all.yaml").write_text(yaml.safe_dump(defaults))
    assert load_config(folder / "all.yaml").ajet.experiment_name == "all"


TEMPLATE = """
ajet:
  rm_weight: {{RM_WEIGHT}}
  judge: {rm_llm: {{RM_LLM}}, list: [{{FIRST}}]}
  rollout: {user_workflow: flow.py->Flow, num_repeat: {{NUM_REPEAT}}}
  task_reader:
    type: deep_finance
    deep_finance: {training: {file_path: {{DATA}}}}
    env_service: {env_type: finworld, env_url: "http://127.0.0.1:8080"}
"""


def test_a_template_says_what_is_not_filled_in_and_takes_it_from_the_command_line(folder: Path) -> None:
    (folder / "template.yaml").write_text(TEMPLATE)
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "template.yaml", ["rm_weight=0.5"])
    said = str(caught.value)
    assert "template.yaml:4: ajet.judge.rm_llm: {{RM_LLM}} stands for a value" in said
    assert "ajet.judge.list.0: {{FIRST}}" in said and "add `rollout.num_repeat=…` to the command" in said
    assert "RM_WEIGHT" not in said
    values = ("rm_weight=0.5", "judge.rm_llm=qwen", "judge.list=[1]", "rollout.num_repeat=2")
    config = load_config(folder / "template.yaml", [*values, "task_reader.deep_finance.training.file_path=x.json"])
    ajet = config.ajet
    assert (ajet.rm_weight, ajet.judge.rm_llm, ajet.rollout.num_repeat) == (0.5, "qwen", 2)
    assert ajet.task_reader.type == "tutorial.example_deep_finance.deep_finance_reader->DeepFinanceReader"
    assert ajet.task_reader.deep_finance.training.file_path == "x.json"


@pytest.mark.parametrize("text", ["a: {{X}: 1}", "a: {{X}, b}", "{{X}}: 1", "a: {{X: 1}}", "a: {{}}"])
def test_other_mappings_as_keys_stay_refused(folder: Path, text: str) -> None:
    (folder / "braces.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"braces.yaml:1: a key must be a name"):
        load_config(folder / "braces.yaml")


def test_the_threads_of_a_trace_filter_are_those_of_the_reader(folder: Path) -> None:
    filters = "[{type: llm_evaluate, params: {max_thread: 16}}]"
    reader = f"{{type: tracing, feedback_tracing: {{base_url: a.sqlite, filters: {filters}}}}}"
    config = load(folder, "", f"task_reader={reader}")
    assert config.ajet.task_reader.tracing.max_thread == 16
