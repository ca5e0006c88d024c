"""The memory plan: shapes without files, what is counted where, and what is said if it is too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ajet.backbone import memory
from ajet.backbone.memory import (
    CUDA_BYTES,
    GIB,
    WIDTH,
    Device,
    MemoryPlan,
    changes_that_help,
    plan_memory,
    refuse_if_hopeless,
)
from ajet.cli.main import main
from ajet.config import make_config
from ajet.engine.model_source import ModelSource
from ajet.engine.torch import FULL_LENGTH_CACHE
from ajet.engine.torch.kv_cache import KVPool
from ajet.engine.torch.readers import PassPart
from ajet.engine.torch.runner import Runner, Work
from ajet.schema.errors import ConfigError
from support.hybrids import hybrid_config, hybrid_model

TINY = "tiny:qwen3-3m"
H200 = Device("cuda", 141 * GIB)
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
}
"""Parameters, as the models' own files have them."""


def planned(device: Device, backbone: Any = "local", **keys: Any) -> MemoryPlan:
    config = make_config({key.replace("__", "."): value for key, value in keys.items()})
    plan = plan_memory(config, backbone, device)
    assert plan is not None
    return plan


def size(plan: MemoryPlan, what: str) -> int:
    return sum(part.size for part in plan.parts if part.what == what)


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(name: str) -> None:
    model = ModelSource.resolve(name).on_meta("auto", "cuda")
    assert model is not None
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.slow
def test_whole_weights_take_sixteen_bytes_each_and_adapters_hardly_any() -> None:
    common = {"model__path": TINY, "trainer_common__max_tokens_per_step": 64, "rollout__kv_cache_gb": 0.001}
    lengths = {"rollout__max_model_len": 64, "data__max_prompt_length": 32, "data__max_response_length": 32}
    whole = planned(H200, **common, **lengths, trainer_common__use_kl_loss=False)
    model = ModelSource.resolve(TINY).on_meta("auto", "cuda")
    assert model is not None
    count = sum(parameter.numel() for parameter in model.parameters())
    parts = [size(whole, what) for what in ("weights", "gradients", "optimiser", "float32 copy")]
    assert parts == [2 * count, 2 * count, 8 * count, 4 * count]
    assert size(whole, "reference") == 0 < size(whole, "KV cache") == 10**6
    assert size(planned(H200, **common, **lengths), "reference") == 2 * count
    imitating = planned(H200, **common, **lengths, trainer_common__algorithm__policy_loss="sft")
    assert size(imitating, "reference") == 0
    adapted = planned(H200, **common, **lengths, model__lora__enabled=True)
    assert adapted.total < whole.total
    assert size(adapted, "reference") == 0 < size(adapted, "gradients") < 2 * count
    eight = planned(H200, **common, **lengths, trainer_common__optim__state_bits=8)
    assert size(eight, "optimiser") < size(whole, "optimiser") * 0.27
    bare = planned(H200, **common, **lengths, trainer_common__optim__master="none")
    assert size(bare, "float32 copy") == 0 < size(bare, "optimiser")
    away = planned(H200, **common, **lengths, **{"trainer_common__fsdp_config__optimizer_offload": True})
    assert size(away, "optimiser") == size(away, "float32 copy") == 0
    assert "main memory" in away.notes[0]


def test_servers_that_run_elsewhere_take_nothing_here() -> None:
    keys = {"model__path": TINY, "rollout__max_model_len": 64, "trainer_common__max_tokens_per_step": 64}
    assert size(planned(H200, **keys), "KV cache") > 0
    assert size(planned(H200, **keys, rollout__engine="sglang"), "KV cache") == 0


def test_verl_divides_over_all_gpus() -> None:
    one = planned(H200, "verl", model__path=TINY, trainer_common__n_gpus_per_node=1)
    sixteen = planned(H200, "verl", model__path=TINY, trainer_common__n_gpus_per_node=8, trainer_common__nnodes=2)
    for what in ("weights", "gradients", "optimiser"):
        assert size(one, what) == pytest.approx(16 * size(sixteen, what), abs=64)
    assert size(one, "activations") == size(sixteen, "activations")


def test_what_does_not_fit_comes_with_what_helps() -> None:
    config = make_config({"model.path": TINY, "trainer_common.gradient_checkpointing": False})
    whole = plan_memory(config, "local", H200)
    assert whole is not None
    small = Device("cuda", CUDA_BYTES + (whole.total - CUDA_BYTES) // 2)
    plan = plan_memory(config, "local", small)
    assert plan is not None and plan.fits is False
    changes = changes_that_help(config, "local", small, plan)
    assert "trainer_common.gradient_checkpointing: true" in [change.keys for change in changes]
    assert small.capacity is not None and changes[-1].total <= small.capacity
    totals = [plan.total, *(change.total for change in changes)]
    assert totals == sorted(totals, reverse=True)
    assert config.ajet.trainer_common.gradient_checkpointing is False  # what was planned is not what was given
    lines = list(plan.lines(changes))
    assert max(map(len, lines)) <= WIDTH
    assert "it does not fit: each GPU has" in "\n".join(lines)
    refuse_if_hopeless(plan, changes)


@pytest.mark.slow
def test_what_can_never_fit_is_refused_with_the_fix() -> None:
    config = make_config({"model.path": TINY})
    tiny = Device("cuda", 8 * 2**20)
    plan = plan_memory(config, "local", tiny)
    assert plan is not None
    with pytest.raises(ConfigError, match=r"model\.path.*does not fit.*the GPU has 8\.0 MiB: choose a smaller model"):
        refuse_if_hopeless(plan, changes_that_help(config, "local", tiny, plan))


def test_a_model_of_which_nothing_is_known_is_not_planned() -> None:
    assert plan_memory(make_config({"model.path": "nobody/nothing-9B"}), "local", H200) is None
    assert plan_memory(make_config(), "debug", H200) is None


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1_000_003,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def shape_of(folder: Path, family: str) -> str:
    from transformers import AutoConfig

    AutoConfig.for_model(family, **SMALL).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma3_text"])
def test_experts_sinks_and_huge_vocabularies_are_planned_anywhere(tmp_path: Path, family: str) -> None:
    """In float32 on a CPU and in bfloat16 on a GPU, although `meta` lacks some operations."""
    path = shape_of(tmp_path, family)
    short = {"rollout__max_model_len": 512, "trainer_common__max_tokens_per_step": 512}
    for device in (Device("cpu", 900 * GIB), H200):
        plan = planned(device, model__path=path, **short)
        assert plan.fits and size(plan, "activations") > 0
    assert size(plan, "gradients") == size(plan, "weights") >= 1_000_003 * 64 * 2


def test_what_can_not_be_computed_without_weights_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_given: Any, **_options: Any) -> Any:
        raise RuntimeError("unsupported scalarType\nand more")

    monkeypatch.setattr(memory, "_training_bytes", lacks)
    assert plan_memory(make_config({"model.path": TINY}), "local", H200) is None
    assert main(["validate", "configs/quickstart.yaml", "--plan", f"model.path={TINY}"]) == 0
    assert f"memory: not planned, because a pass of {TINY} can't be computed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3.5", "Falcon-H1", "LFM2"])
def test_layers_with_a_state_take_states_and_no_keys(tmp_path: Path, family: str) -> None:
    config = hybrid_config(family)
    config.save_pretrained(tmp_path)
    model = hybrid_model(family)
    cache = config.get_text_config().num_hidden_layers if family == "Falcon-H1" else 2
    runner = Runner(model)
    pool = KVPool(runner.kv_shape, runner.dtype, runner.device, 4096)
    kv = pool.allocate(64, 64)
    assert kv is not None
    kv.keep_at = 9
    runner.forward([], [Work(PassPart(kv, 0, 9), list(range(9)), False)])
    runner.forward([], [Work(PassPart(kv, 9, 20), list(range(20)), True)])
    kept = sum(state.bytes for states in kv.states.values() for state in states)
    keys = {"model__path": str(tmp_path), "rollout__max_model_len": 512, "trainer_common__max_tokens_per_step": 1024}
    plan = planned(Device("cpu", 900 * GIB), **keys, rollout__max_num_seqs=10)
    token = 2 * cache * 2 * 8 * 4
    assert size(plan, "KV cache") == FULL_LENGTH_CACHE * 10 * (512 * token + kept)
    assert size(plan, "states") == 10 * kept // 2


@pytest.mark.slow
def test_the_kl_term_is_not_given_up_where_adapters_help() -> None:
    config = make_config({"model.path": TINY, "rollout.max_model_len": 512, "trainer_common.max_tokens_per_step": 512})
    small = Device("cuda", 8 * 2**20)
    plan = plan_memory(config, "local", small)
    assert plan is not None and size(plan, "reference") > 0
    keys = [change.keys.partition(":")[0] for change in changes_that_help(config, "local", small, plan)]
    assert "model.lora.enabled" in keys and "trainer_common.use_kl_loss" not in keys


def test_a_broken_config_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    with pytest.raises(ConfigError, match=r"config\.json of model"):
        plan_memory(make_config({"model.path": str(tmp_path)}), "local", H200)


@pytest.mark.slow
def test_validate_shows_the_plan_and_ends_with_code_2_if_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "configs/quickstart.yaml", "--plan"]) == 0
    said = capsys.readouterr().out
    assert "KV cache" in said and "it fits: the machine has" in said
    assert main(["validate", "configs/math_gpu.yaml", "--gpu", "1.5", f"model.path={TINY}"]) == 2
    said = capsys.readouterr()
    assert "it does not fit: each GPU has 1.5 GiB" in said.out
    assert f"error: {TINY} needs" in said.err and "; less is needed with trainer_common." in said.err


@pytest.mark.parametrize("given", ["abc", "0", "nan"])
def test_a_memory_that_is_none_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "configs/quickstart.yaml", "--plan", "--gpu", given]) == 2
    assert f"--gpu: '{given}': write a number of GiB" in capsys.readouterr().err
