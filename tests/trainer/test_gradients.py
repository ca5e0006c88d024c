"""Tree training has the gradient of independent rows: every loss, norm and sharing rule, on random trees."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ajet.schema.episode import Episode
from ajet.trainer import loss as losses
from ajet.trainer.credit import CreditSettings, LossNorm, estimators
from ajet.trainer.forward import Entropy, PackForward, RowForward
from ajet.trainer.loss import (
    Correction,
    CorrectionMode,
    EdgeTensors,
    KLType,
    Level,
    LossSettings,
    PolicyLoss,
    policy_loss,
)
from ajet.trainer.pack import Layout, Pack, items_of, make_packs
from support.random_batches import random_batch

VOCAB = 32


class ExactNorm(torch.nn.Module):
    """RMS norm in the precision of its input: transformers' own rounds to float32 on the way."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight = like.weight
        self.epsilon = like.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.epsilon)


def small_model(dtype: torch.dtype, family: str = "qwen2") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    if dtype is torch.float64:
        for module in model.modules():
            for name, child in module.named_children():
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(module, name, ExactNorm(child))
    return model


def tensors(pack: Pack, dtype: torch.dtype, seed: int) -> EdgeTensors:
    """The pack's edges with invented old and reference logprobs, the same for a token wherever it is packed."""
    edges = pack.edges
    noise = np.array(
        [
            np.random.default_rng([seed, *key]).normal(0, 0.4, 2)
            for key in zip(edges.episode.tolist(), edges.call.tolist(), edges.token.tolist(), strict=True)
        ]
    ).reshape(-1, 2)
    return EdgeTensors(
        sampler_E=torch.tensor(edges.sampler_logprob, dtype=dtype),
        trajectory_E=torch.tensor(edges.trajectory),
        entry_edge_M=torch.tensor(edges.entry_edge),
        advantage_M=torch.tensor(edges.entry_advantage, dtype=dtype),
        weight_M=torch.tensor(edges.entry_weight, dtype=dtype),
        old_E=torch.tensor(edges.sampler_logprob + noise[:, 0], dtype=dtype),
        reference_E=torch.tensor(edges.sampler_logprob + noise[:, 1], dtype=dtype),
    )


def gradient(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest per-parameter ‖Δ‖∞ / ‖g‖∞. Key biases are left out: softmax makes their true gradient zero."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp(min=1e-12))
        for name in one
        if not name.endswith("k_proj.bias")
    )


def reference_gradient(
    model: Any,
    episodes: list[Episode],
    credit: Any,
    settings: LossSettings,
    seed: int,
    dtype: torch.dtype,
    multiplicity: bool,
) -> dict[str, Tensor]:
    """Written out by hand: rows one by one through the model as it is, token by token through the formulas."""
    rows = []
    for episode_index, (episode, episode_credit) in enumerate(zip(episodes, credit.episodes, strict=True)):
        tree = episode.tree
        trained = [c for c, call in enumerate(tree.calls) if episode_credit.calls[c].entries]
        if not multiplicity:
            rows += [(episode_index, call, [call], episode_credit.calls[call].entries[0]) for call in trained]
            continue
        above = {c: [tree.runs[r].call for r in tree.path(tree.calls[c].prompt_run)] for c in trained}
        for leaf in trained:
            if not any(leaf in above[other] for other in trained):
                calls = [c for c in above[leaf] if c in trained] + [leaf]
                rows.append((episode_index, leaf, calls, episode_credit.calls[leaf].entries[0]))

    def token_logits(episode_index: int, call: int) -> tuple[Tensor, Any, np.ndarray]:
        tree = episodes[episode_index].tree
        c = tree.calls[call]
        reply = tree.runs[c.run].ids
        ids = torch.tensor(np.concatenate([tree.prompt_ids(call), reply]).astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0]
        logits = logits[c.prompt_tokens - 1 : -1] / (c.sampling.temperature or 1.0)
        return logits.log_softmax(-1), c, reply

    def known(episode_index: int, call: int, token: int) -> tuple[float, float, float]:
        sampler = float(np.float64(episodes[episode_index].tree.calls[call].logprobs[token]))
        noise = np.random.default_rng([seed, episode_index, call, token]).normal(0, 0.4, 2)
        return sampler, sampler + noise[0], sampler + noise[1]

    sampler_gaps: dict[tuple[int, str], list[float]] = {}
    for episode_index, episode_credit in enumerate(credit.episodes):
        for index, call_credit in enumerate(episode_credit.calls):
            if call_credit.entries:
                made = episodes[episode_index].tree.calls[index]
                for t in np.flatnonzero(made.mask):
                    sampler, old, _ = known(episode_index, index, int(t))
                    sampler_gaps.setdefault((episode_index, made.agent), []).append(old - sampler)

    ratios: dict[tuple[int, str], list[float]] = {}
    if settings.policy_loss is losses.GSPO:
        for episode_index, episode_credit in enumerate(credit.episodes):
            for call, call_credit in enumerate(episode_credit.calls):
                if call_credit.entries:
                    with torch.no_grad():
                        log, c, reply = token_logits(episode_index, call)
                    for t in np.flatnonzero(c.mask):
                        gap = float(log[t, reply[t]]) - known(episode_index, call, int(t))[1]
                        ratios.setdefault((episode_index, c.agent), []).append(gap)

    model.zero_grad(set_to_none=True)
    for episode_index, _leaf, calls, (advantage, weight) in rows:
        for call in calls:
            log, c, reply = token_logits(episode_index, call)
            total = torch.zeros((), dtype=dtype)
            for t in np.flatnonzero(c.mask):
                sampler, old, reference = known(episode_index, call, int(t))
                new = log[t, reply[t]]
                trajectory = np.exp(sum(sampler_gaps[episode_index, c.agent]))
                w = weight * by_hand(settings.correction, np.exp(old - sampler), trajectory)
                ratio = (new - old).exp()
                if settings.policy_loss is losses.GSPO:
                    s = np.exp(np.mean(ratios[episode_index, c.agent]))
                    ratio = s * (new - new.detach()).exp()
                low, high = 1 - settings.clip_low, 1 + settings.clip_high
                if settings.policy_loss is losses.SFT:
                    total = total - weight * new
                    continue
                if settings.policy_loss is losses.CISPO:
                    total = total - w * min(float(ratio.detach()), high) * advantage * new
                else:
                    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                    if settings.clip_dual is not None and advantage < 0:
                        gain = gain.clamp(min=settings.clip_dual * advantage)
                    total = total - w * gain
                d = reference - new
                low_var = (d.exp() - d - 1).clamp(-10, 10)
                kl = d * d / 2 if settings.kl_type not in (KLType.K1, KLType.LOW_VAR_KL) else low_var
                if settings.kl_type is KLType.K1:
                    kl = -d
                entropy = -(log[t].exp() * log[t]).sum()
                total = total + weight * (settings.kl_coef * kl - settings.entropy_coef * entropy)
            total.backward()
    return gradient(model)


def by_hand(correction: Correction | None, token: float, trajectory: float) -> float:
    """The factor of a token's weight, from its ratio π_old / π_sampler and from its trajectory's."""
    if correction is None:
        return 1.0
    if correction.mode is CorrectionMode.TOKEN_TIS:
        return min(token, correction.cap)
    if correction.mode is CorrectionMode.SEQUENCE_TIS:
        return min(trajectory, correction.cap)
    ratio = token if correction.level is Level.TOKEN else trajectory
    return ratio if correction.low <= ratio <= correction.high else 0.0


def packed_gradient(
    model: Any, packs: list[Pack], settings: LossSettings, seed: int, dtype: torch.dtype, rows: bool = False
) -> dict[str, Tensor]:
    forward = RowForward(budget=64) if rows else PackForward()
    means = sampler_sums = None
    count = 1 + max(int(pack.edges.trajectory.max()) for pack in packs)
    if len(packs) > 1:
        sampler_sums = torch.zeros(count, dtype=dtype)
        for pack in packs:
            edges = tensors(pack, dtype, seed)
            assert edges.old_E is not None
            sampler_sums.index_add_(0, edges.trajectory_E, edges.old_E - edges.sampler_E)
    with forward.session(model):
        if settings.policy_loss is losses.GSPO and len(packs) > 1:
            sums, numbers = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
            for pack in packs:
                with torch.no_grad():
                    gap = forward(model, pack).logprob_E - tensors(pack, dtype, seed).old_E
                sums.index_add_(0, torch.tensor(pack.edges.trajectory), gap)
                numbers.index_add_(0, torch.tensor(pack.edges.trajectory), torch.ones_like(gap))
            means = sums / numbers
        for pack in packs:
            logprobs = forward(model, pack, entropy=Entropy.GRADIENT)
            edges = tensors(pack, dtype, seed)
            edges.log_ratio_T, edges.sampler_log_ratio_T = means, sampler_sums
            policy_loss(logprobs.logprob_E, edges, settings, logprobs.entropy_E).loss.backward()
    return gradient(model)


CORRECTIONS = {
    "uncorrected": None,
    "token_tis": Correction(cap=1.2),
    "sequence_tis": Correction(CorrectionMode.SEQUENCE_TIS, cap=1.5),
    "masked_tokens": Correction(CorrectionMode.MASKED, low=0.7, high=1.4),
    "masked_sequences": Correction(CorrectionMode.MASKED, level=Level.SEQUENCE, low=0.4, high=2.5),
}

CASES = [
    pytest.param(
        loss, norm, multiplicity, kl, CORRECTIONS[correction],
        id=f"{loss}-{norm}-{'multiplicity' if multiplicity else 'once'}-{kl}-{correction}",
    )
    for loss in (losses.PPO, losses.GSPO, losses.CISPO, losses.SFT)
    for norm, kl, correction in zip(cycle(LossNorm), KLType, CORRECTIONS, strict=False)
    for multiplicity in (False, True)
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "norm", "multiplicity", "kl", "correction"), CASES)
def test_tree_gradient_equals_rows(
    loss: PolicyLoss, norm: LossNorm, multiplicity: bool, kl: KLType, correction: Correction | None
) -> None:
    credit_settings = CreditSettings(loss_norm=norm, multiplicity=multiplicity, dr_grpo_length=20.0, gamma=0.9)
    settings = LossSettings(loss, clip_dual=1.5, kl_coef=0.1, kl_type=kl, entropy_coef=0.05, correction=correction)
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        model = small_model(dtype)
        seed = len(loss.name) * 100 + len(norm) * 10 + multiplicity
        episodes, _, credit = random_batch(seed, vocab=VOCAB, settings=credit_settings)
        expected = reference_gradient(model, episodes, credit, settings, seed, dtype, multiplicity)
        items = items_of([(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)])
        for layout, budget in ((Layout.TREE, None), (Layout.TREE, 40)):
            got = packed_gradient(model, make_packs(items, layout, budget), settings, seed, dtype)
            assert worst(expected, got) <= bound


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rows", [False, True])
def test_every_layout_and_executor_agrees(seed: int, rows: bool) -> None:
    correction = list(CORRECTIONS.values())[seed % len(CORRECTIONS)]
    settings = LossSettings(kl_coef=0.05, clip_dual=1.5, correction=correction)
    dtype = torch.float64
    model = small_model(dtype, "qwen3" if seed % 2 else "llama")
    options = CreditSettings(estimator=estimators.RLOO, multiplicity=bool(seed % 3 == 0))
    episodes, _, credit = random_batch(seed, vocab=VOCAB, groups=2, repeat=3, calls=6, settings=options)
    items = items_of([(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)])
    tree = packed_gradient(model, make_packs(items), settings, seed, dtype)
    for layout in (Layout.MERGED, Layout.FLAT):
        assert worst(tree, packed_gradient(model, make_packs(items, layout), settings, seed, dtype, rows)) <= 1e-9
