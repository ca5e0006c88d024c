"""A mixture follows the experts that the sampler chose, so rounding in a router doesn't change what a token's
probability is."""

from __future__ import annotations

import asyncio
import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from ajet.engine.routing import following, noting, routers_of
from ajet.engine.torch import TorchEngine, TorchEngineSettings
from ajet.schema.chat import Completion
from ajet.schema.episode import ROOT, Call, CallTree, Run
from ajet.schema.errors import EngineError, FeatureUnavailableError
from ajet.trainer.credit.estimators import CallCredit, EpisodeCredit
from ajet.trainer.executor import checkpointing, follow_sampler
from ajet.trainer.forward import RowForward
from ajet.trainer.pack import Layout, items_of, make_packs
from ajet.trainer.trainer import TrainSettings, Updater
from support.small_models import small_model
from support.torch_helpers import ask

FAMILIES = ["qwen3_moe", "gpt_oss"]
NOISE = 1e-3
"""Of the sampler's router weights: far more than rounding, which differs between processors, and far less than what
tells two experts apart that don't score alike."""


def mixture(family: str) -> Any:
    """Every two experts score alike, so of the third that a token goes to, the noise decides."""
    options = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    model = small_model(family, **options, vocab_size=512, pad_token_id=0, attn="eager")
    with torch.no_grad():
        for router in routers_of(model):
            for weights in router.parameters():
                weights.normal_()
                weights[1::2] = weights[0::2]
    model.config.name_or_path = "tiny:qwen2"  # whose tokenizer it has
    return model.eval()


def sampler_of(model: Any) -> Any:
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in routers_of(noisy):
            for weights in router.parameters():
                weights += NOISE * torch.randn(weights.shape, generator=generator)
    return noisy


def add(tree: CallTree, extends: int, context: list[int], reply: Completion) -> None:
    """A call that goes on from another's reply."""
    parent = ROOT if extends == ROOT else tree.calls[extends].run
    start = 0 if parent == ROOT else tree.runs[parent].start + len(tree.runs[parent].ids)
    tree.runs.append(Run(np.array(context, np.int32), parent, start))
    prompt, end = len(tree.runs) - 1, start + len(context)
    tree.runs.append(Run(np.array(reply.token_ids, np.int32), prompt, end, call=len(tree.calls)))
    logprobs, mask = np.array(reply.logprobs, np.float32), np.ones(len(reply.logprobs), np.bool_)
    call = Call("c", "a", "t", 0, prompt, end, len(tree.runs) - 1, logprobs, mask, extends=extends)
    call.keep_experts(reply.experts, None if extends == ROOT else tree.calls[extends])
    tree.calls.append(call)


def conversation(sampler: Any) -> CallTree:
    """Two turns, and another second turn."""
    engine = TorchEngine(sampler, TorchEngineSettings(max_model_len=512, notes_experts=True))
    tree, first = CallTree(), list(range(7, 47))
    reply = ask(engine, first, max_tokens=20, seed=1, ignore_eos=True)
    add(tree, ROOT, first, reply)
    for message in (list(range(60, 75)), list(range(90, 101))):
        prompt = first + reply.token_ids + message
        add(tree, 0, message, ask(engine, prompt, max_tokens=20, seed=2, ignore_eos=True))
    asyncio.run(engine.aclose())
    return tree


def gap(model: Any, tree: CallTree, **settings: Any) -> float:
    """The largest difference between the sampler's and the trainer's logprob of a token."""
    batch = [(tree, EpisodeCredit("e", [CallCredit([(1.0, 1.0)]) for _ in tree.calls]))]
    found = Updater(model, TrainSettings(**settings)).logprobs(batch)
    return max(float(np.abs(values - tree.calls[call].logprobs).max()) for (_, call), values in found.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_has_the_samplers_probabilities_where_it_follows_its_routes(family: str) -> None:
    model = mixture(family)
    sampler = sampler_of(model)
    tree = conversation(sampler)
    for index, call in enumerate(tree.calls):
        experts = tree.experts_of(index)
        assert experts is not None and call.experts is not None
        assert experts.shape == (call.prompt_tokens + 19, len(routers_of(model)), 3)
        assert len(call.experts) == len(experts) - (0 if index == 0 else tree.calls[0].computed_tokens)
    assert gap(sampler, tree, follows_sampler=True) < 1e-4
    assert gap(model, tree, follows_sampler=True) < 0.1
    assert gap(model, tree) > 0.2


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_a_model_whose_routers_choose_so(family: str, checkpointing: bool) -> None:
    """In the backward pass, too, where layers are computed again. Trees and rows agree."""
    model = mixture(family)
    tree = conversation(sampler_of(model))
    batch = [(tree, EpisodeCredit("e", [CallCredit([(1.0, 1.0)]) for _ in tree.calls]))]
    found = []
    for budget in (None, 70):  # one tree; a pack for each call
        trained = copy.deepcopy(model)
        settings = TrainSettings(follows_sampler=True, gradient_checkpointing=checkpointing, max_tokens=budget)
        metrics = Updater(trained, settings).update(batch)
        assert metrics["tokens/routed_as_sampled"] == metrics["tokens/computed"]
        assert metrics["loss/sampler_gap_max"] < 0.1
        found.append(metrics["train/grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_rows_that_are_computed_again_follow_their_own_routes() -> None:
    """All rows of a pack are computed before the backward pass begins with the last."""
    model = mixture("qwen3_moe")
    tree = conversation(sampler_of(model))
    items = items_of([(tree, EpisodeCredit("e", [CallCredit([(1.0, 1.0)]) for _ in tree.calls]))])
    (pack,) = make_packs(items, Layout.FLAT)
    follow_sampler([pack], items)
    assert len(pack.rows) == 3
    found = []
    for context in (nullcontext(), checkpointing(model)):
        model.zero_grad()
        with context, following(model):
            RowForward(budget=1)(model, pack).logprob_E.sum().backward()  # type: ignore[no-untyped-call]
        found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


def test_weights_of_followed_experts_come_from_the_models_own_scores() -> None:
    model = mixture("qwen3_moe")
    ids = torch.arange(20)[None]
    with noting(routers_of(model)) as chosen:
        plain = model(input_ids=ids).logits
    own = torch.stack(chosen, dim=1)[None]
    with following(model):
        same = model(input_ids=ids, ajet_experts=own).logits
        free = model(input_ids=ids, ajet_experts=torch.full_like(own, -1)).logits
        others = model(input_ids=ids, ajet_experts=(own + 1) % 6).logits
        without = model(input_ids=ids).logits
    assert torch.equal(same, plain) and torch.equal(free, plain) and torch.equal(without, plain)
    assert not torch.allclose(others, plain, atol=1e-2)
    assert torch.equal(model(input_ids=ids).logits, plain)


def test_an_engine_may_note_all_layers_or_those_with_a_router() -> None:
    """vLLM notes all, and 0 where nothing is chosen."""
    options = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    model = small_model("qwen3_moe", **options, num_hidden_layers=3, mlp_only_layers=[1], attn="eager")
    ids = torch.arange(20)[None]
    others = torch.stack([torch.randperm(6)[:3] for _ in range(40)]).reshape(1, 20, 2, 3)
    of_all = torch.stack([others[:, :, 0], torch.zeros_like(others[:, :, 0]), others[:, :, 1]], dim=2)
    with following(model):
        short = model(input_ids=ids, ajet_experts=others).logits
        assert torch.equal(model(input_ids=ids, ajet_experts=of_all).logits, short)
        assert not torch.allclose(model(input_ids=ids).logits, short, atol=1e-2)
        with pytest.raises(EngineError, match="noted the experts of 4 layers, and the model has 3"):
            model(input_ids=ids, ajet_experts=torch.zeros(1, 20, 4, 3, dtype=torch.long))


def test_a_model_without_such_routers_is_refused_by_name() -> None:
    with pytest.raises(FeatureUnavailableError, match=r"ajet\.rollout\.routing_replay: Qwen3ForCausalLM has no router"):
        routers_of(small_model("qwen3"))


def test_the_experts_of_a_long_conversation() -> None:
    """Each of its calls adds a context token and a reply of one, and has noted what the one before has not."""
    tree, routes = CallTree(), np.arange(3000, dtype=np.int16).reshape(-1, 1, 1)
    for turn in range(1500):
        call = Call("c", "a", "t", turn, 0, 2 * turn + 1, logprobs=np.zeros(1, np.float32), extends=turn - 1)
        call.keep_experts(routes[: call.computed_tokens], tree.calls[-1] if turn else None)
        tree.calls.append(call)
    noted = tree.experts_of(1499)
    assert noted is not None and (noted == routes[:2999]).all()
