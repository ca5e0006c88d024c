"""`Updater.update` as a whole against the papers' formulas on plain rows: passes, mini-batches, adapters and packs
together, with plain AdamW behind them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from test_gradients import small_model
from torch import Tensor

from ajet.schema.episode import Call
from ajet.trainer import loss as losses
from ajet.trainer.credit import CreditSettings, LossNorm
from ajet.trainer.credit.estimators import mini_batches
from ajet.trainer.loss import Correction, CorrectionMode, KLType, Level, LossSettings
from ajet.trainer.optimizer import OptimSettings
from ajet.trainer.trainer import TrainSettings, Updater
from support.random_batches import random_batch

SEED = 5
OPTIM = OptimSettings(lr=3e-3, weight_decay=0.01)
GSPO = LossSettings(losses.GSPO, clip_low=3e-4, clip_high=4e-4)


@dataclass
class Row:
    """One trained call: its prompt and reply as a row of its own."""

    episode: int
    key: tuple[int, int]
    call: Call
    ids: Tensor
    entries: list[tuple[float, float]]

    @property
    def tokens(self) -> int:
        return int(self.call.mask.sum()) * len(self.entries)

    @property
    def trajectory(self) -> tuple[int, str]:
        return self.episode, self.call.agent

    @property
    def sampler(self) -> Tensor:
        return torch.tensor(self.call.logprobs[self.call.mask].astype(np.float64))

    def logprobs(self, model: Any) -> tuple[Tensor, Tensor]:
        """Of the trained tokens: their logprobs, and the entropies where they were drawn."""
        logits = model(input_ids=self.ids[None], use_cache=False).logits[0][self.call.prompt_tokens - 1 : -1]
        log = (logits / (self.call.sampling.temperature or 1.0)).log_softmax(-1)[self.call.mask]
        target = self.ids[self.call.prompt_tokens :][self.call.mask]
        return log.gather(1, target[:, None])[:, 0], -(log.exp() * log).sum(-1)


def rows_of(episodes: list[Any], credit: Any) -> list[Row]:
    rows = []
    for number, (episode, given) in enumerate(zip(episodes, credit.episodes, strict=True)):
        tree = episode.tree
        for index, call in enumerate(tree.calls):
            if given.calls[index].entries and call.mask.any():
                ids = np.concatenate([tree.prompt_ids(index), tree.runs[call.run].ids]).astype(np.int64)
                rows.append(Row(number, (number, index), call, torch.tensor(ids), given.calls[index].entries))
    return rows


def factor(correction: Correction | None, token: Tensor, trajectory: Tensor) -> Tensor:
    if correction is None:
        return torch.ones_like(token)
    if correction.mode is CorrectionMode.TOKEN_TIS:
        return token.clamp(max=correction.cap)
    if correction.mode is CorrectionMode.SEQUENCE_TIS:
        return trajectory.clamp(max=correction.cap)
    ratio = token if correction.level is Level.TOKEN else trajectory
    return ratio * ((ratio >= correction.low) & (ratio <= correction.high))


def row_loss(row: Row, model: Any, settings: LossSettings, scale: float, known: dict[str, Any]) -> Tensor:
    new, entropy = row.logprobs(model)
    old, reference = known["old"][row.key], known["reference"].get(row.key)
    corrected = factor(settings.correction, (old - row.sampler).exp(), known["gap"][row.trajectory].expand_as(old))
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    total = torch.zeros((), dtype=torch.float64)
    for advantage, weight in row.entries:
        ratio = (new - old).exp()
        if settings.policy_loss is losses.GSPO:
            ratio = known["mean"][row.trajectory].exp() * (new - new.detach()).exp()
        keep = torch.ones_like(old)
        if (
            settings.sequence_mask is not None
            and advantage < 0
            and -known["drift"][row.trajectory] > settings.sequence_mask
        ):
            keep = torch.zeros_like(old)
        if settings.policy_loss is losses.DPPO_TV:
            corrected, ratio = keep, (new - row.sampler).exp()
            moved = new.detach().exp() - row.sampler.exp()  # up with r > 1, down with r < 1
            bound = moved > settings.clip_high if advantage > 0 else moved < -settings.clip_low
            gain = ratio * advantage * ~bound
        elif settings.policy_loss is losses.SAPO:
            tau = settings.tau_pos if advantage > 0 else settings.tau_neg
            gain = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
        elif settings.policy_loss is losses.CISPO:
            gain = ratio.detach().clamp(max=high) * advantage * new
        else:
            gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            if advantage < 0 and settings.clip_dual is not None:
                gain = gain.clamp(min=settings.clip_dual * advantage)
        total = total - scale * weight * ((keep * corrected * gain).sum() + settings.entropy_coef * entropy.sum())
        if reference is not None:
            d = reference - new
            kl = d * d / 2  # k2; a `+` has its gradient
            if settings.kl_type is KLType.LOW_VAR_KL_CORRECTED:
                kl = (new - old).exp() * (d.exp() - d - 1)
            total = total + scale * weight * settings.kl_coef * kl.sum()
    return total


def by_hand(model: Any, rows: list[Row], settings: TrainSettings, norm: LossNorm) -> None:
    """All updates of one step, on this model."""
    loss, optim = settings.loss, settings.optim
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decays = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": optim.weight_decay}]
    adam = torch.optim.AdamW([*decays, {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}], optim.lr)
    known: dict[str, Any] = {"reference": {}}
    with torch.no_grad():
        known["old"] = {row.key: row.logprobs(model)[0] for row in rows}
        if loss.kl_coef:
            with model.disable_adapter():
                known["reference"] = {row.key: row.logprobs(model)[0] for row in rows}
    played = sorted({row.episode for row in rows})
    tokens = [sum(row.tokens for row in rows if row.episode == episode) for episode in played]
    updates = 0
    for _ in range(settings.epochs):
        parts = mini_batches(tokens, settings.mini_batches, norm, (settings.seed, updates))
        for part in parts:
            share = len(part.episodes) / len(played)
            if norm is LossNorm.TOKEN_MEAN:
                share = sum(tokens[index] for index in part.episodes) / sum(tokens)
            members = [row for row in rows if row.episode in {played[index] for index in part.episodes}]
            for name, start, end in (
                ("gap", lambda r: r.sampler, None),
                ("mean", lambda r: known["old"][r.key], model),
                ("drift", lambda r: r.sampler, model),
            ):
                found: dict[tuple[int, str], list[Tensor]] = {}
                with torch.no_grad():
                    for row in members:
                        old = known["old"][row.key]
                        change = (old if end is None else row.logprobs(end)[0]) - start(row)
                        found.setdefault(row.trajectory, []).append(change)
                sums = {key: torch.cat(values) for key, values in found.items()}
                known[name] = {key: v.sum().exp() if name == "gap" else v.mean() for key, v in sums.items()}
            for row in members:
                row_loss(row, model, loss, 1 / share, known).backward()
            torch.nn.utils.clip_grad_norm_(trained, optim.clip_grad)
            adam.step()
            adam.zero_grad()
            updates += 1


def adapted(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings).double()


MASKED_BY_SEQUENCE = Correction(CorrectionMode.MASKED, level=Level.SEQUENCE, low=0.01, high=100.0)
KL = {"kl_coef": 0.2, "kl_type": KLType.LOW_VAR_KL_PLUS}
TWICE = {"mini_batches": 2, "epochs": 2}
CASES: dict[str, tuple[LossSettings, LossNorm, dict[str, Any]]] = {
    "ppo": (LossSettings(correction=Correction(cap=1.1), entropy_coef=0.03), LossNorm.TOKEN_MEAN, TWICE),
    "gspo": (replace(GSPO, correction=MASKED_BY_SEQUENCE), LossNorm.SEQUENCE_MEAN, {**TWICE, "max_tokens": 24}),
    "dr_grpo": (LossSettings(correction=None), LossNorm.DR_GRPO, {"mini_batches": 3, "max_tokens": 24}),
    "cispo": (
        LossSettings(losses.CISPO, correction=Correction(CorrectionMode.SEQUENCE_TIS, cap=3.0)),
        LossNorm.DR_GRPO,
        {**TWICE, "logits_chunk": 3},
    ),
    "adapters": (
        LossSettings(**KL, entropy_coef=0.03),  # type: ignore[arg-type]
        LossNorm.SEQUENCE_MEAN,
        {**TWICE, "max_tokens": 60, "gradient_checkpointing": True, "logits_chunk": 3},
    ),
    "dppo": (LossSettings(losses.DPPO_TV, 0.01, 0.02), LossNorm.TOKEN_MEAN, {**TWICE, "max_tokens": 24}),
    "sapo": (
        LossSettings(losses.SAPO, correction=Correction(cap=1.1), sequence_mask=-0.01),
        LossNorm.SEQUENCE_MEAN,
        {**TWICE, "max_tokens": 24},
    ),
    "adapters, corrected kl, sequence mask": (
        LossSettings(kl_coef=0.2, kl_type=KLType.LOW_VAR_KL_CORRECTED, sequence_mask=0.0),
        LossNorm.TOKEN_MEAN,
        {**TWICE, "max_tokens": 60},
    ),
    "adapters, gspo": (replace(GSPO, **KL), LossNorm.TOKEN_MEAN, {"epochs": 2, "max_tokens": 24}),
}


@pytest.mark.parametrize("multiplicity", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_plain_rows(case: str, multiplicity: bool) -> None:
    loss, norm, options = CASES[case]
    settings = TrainSettings(loss, OPTIM, seed=SEED, **options)
    credit_settings = CreditSettings(loss_norm=norm, multiplicity=multiplicity, dr_grpo_length=17.0)
    episodes, _, credit = random_batch(SEED + multiplicity, repeat=3, calls=4, settings=credit_settings)
    model = small_model(torch.float64)
    if case.startswith("adapters"):
        model = adapted(model)
    expected = copy.deepcopy(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    metrics = Updater(model, settings).update([(e.tree, c) for e, c in zip(episodes, credit.episodes, strict=True)])
    by_hand(expected, rows_of(episodes, credit), settings, norm)
    assert metrics["train/updates"] == settings.mini_batches * settings.epochs
    for name, parameter in expected.named_parameters():
        if parameter.requires_grad and not name.endswith("k_proj.bias"):  # whose true gradient is zero
            moved = float((parameter.detach() - before[name]).abs().max())
            assert moved > 0.0
            assert float((parameter - model.get_parameter(name)).detach().abs().max()) <= 1e-6 * moved, name
