"""Our algorithm for Trinity: losses in the form that its trainer calls, credit for its pipeline, and whole batches.

Each token comes with its advantage and its weight; the loss, its KL and entropy terms included, is a sum over tokens,
whatever rows or micro-batches they came in, so it has the embedded trainer's gradient. The ratio is to the policy that
sampled.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import ray
import torch
from torch import Tensor
from trinity.algorithm.advantage_fn.advantage_fn import AdvantageFn
from trinity.algorithm.algorithm import AlgorithmType
from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import EntropyLossFn
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.algorithm.sample_strategy.sample_strategy import SampleStrategy
from trinity.algorithm.sample_strategy.utils import representative_sample
from trinity.buffer.buffer import get_buffer_reader
from trinity.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity.common.config import BufferConfig
from trinity.common.experience import Experience
from trinity.utils.timer import Timer

from ajet.backbone.ray.collector import COLLECTOR
from ajet.backbone.ray.credit import SEGMENTS, BatchCredit, BatchRow, credit_batch, lay_out
from ajet.backbone.ray.facts import RunPayload
from ajet.backbone.ray.rows import BATCH, ROW, SPAN, UPDATES, VERSIONS, ordered, tag_of
from ajet.backbone.ray.trinity.host import step_of
from ajet.backbone.training_settings import credit_settings, imitate_from, loss_settings
from ajet.config import Config
from ajet.trainer.credit import LossNorm
from ajet.trainer.loss import EdgeTensors, policy_loss

METRICS = {"policy/sum": "pg_loss", "kl/sum": "kl_loss", "clip_fraction/sum": "clip_fraction", "ratio/sum": "ratio"}
"""Our metrics (sums), and the names under which Trinity reports their means."""


class AjetAlgorithm(AlgorithmType):  # type: ignore[misc]
    """No critic; advantages are in the experiences; a reference model only if there is a KL term."""

    use_critic: bool = False
    use_reference: bool = True
    compute_advantage_in_trainer: bool = False
    can_balance_batch: bool = True
    schema: str = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        return {}


class AjetAlgorithmWithoutReference(AjetAlgorithm):
    """Without a KL term, and so without a second model in memory."""

    use_reference: bool = False


class AjetPolicyLoss(PolicyLossFn):  # type: ignore[misc]
    """Without a KL term. Trinity hands over the fields that `__call__` names; its field for returns, which is otherwise
    unused here, holds the token weights.

    `scale`: data-parallel ranks, because gradients are averaged over them.
    """

    def __init__(self, backend: str = "verl", *, payload: str, scale: float = 1.0) -> None:
        super().__init__(backend=backend)
        # nothing to correct: the ratio is to the sampler itself
        self._settings = loss_settings(RunPayload.decode(payload).load_config())
        self._scale = scale

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor, returns: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        return self._loss(logprob, old_logprob, advantages, returns)

    def _loss(
        self, logprob: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, reference: Tensor | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        at = weights.nonzero(as_tuple=True)
        if not len(at[0]):
            return logprob.sum() * 0.0, {}
        edges = EdgeTensors(
            sampler_E=old[at],
            trajectory_E=at[0],
            entry_edge_M=torch.arange(len(at[0]), device=logprob.device),
            advantage_M=advantages[at].to(logprob.dtype),
            weight_M=weights[at].to(logprob.dtype),
            old_E=old[at],
            reference_E=None if reference is None else reference[at],
        )
        result = policy_loss(logprob[at], edges, self._settings)
        total = float(edges.weight_M.sum())
        metrics = {name: float(result.sums[ours]) / total for ours, name in METRICS.items() if ours in result.sums}
        return result.loss * self._scale, metrics

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


class AjetPolicyLossWithReference(AjetPolicyLoss):
    """With a KL term."""

    def __call__(  # type: ignore[override]
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
        ref_logprob: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        return self._loss(logprob, old_logprob, advantages, returns, ref_logprob)


class AjetEntropy(EntropyLossFn):  # type: ignore[misc]
    """The entropy term, weighted like the loss; Trinity subtracts it."""

    def __init__(self, entropy_coef: float, scale: float = 1.0) -> None:
        self._coef = entropy_coef
        self._scale = scale

    def __call__(self, entropy: Tensor, action_mask: Tensor, **fields: Any) -> tuple[Tensor, dict[str, float]]:
        """One micro-batch of padded rows; `returns` are the tokens' weights."""
        weights = fields["returns"].to(entropy.dtype)
        total = (weights * entropy).sum()
        share = float(weights.sum())
        return self._coef * self._scale * total, {"entropy": float(total.detach()) / share} if share else {}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"entropy_coef": 0.0}


class AjetCredit(AdvantageFn, ExperienceOperatorV1):  # type: ignore[misc]
    """Built by Trinity in the process of its experience pipeline."""

    def __init__(self, payload: str) -> None:
        self._config = RunPayload.decode(payload).load_config()

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """All experiences of one batch of the explorer."""
        if not exps:
            return [], {}
        step = step_of(exps[0].eid.batch)
        groups = list(dict.fromkeys(exp.info[ROW].rsplit("_", 2)[0] for exp in exps))
        collector = ray.get_actor(COLLECTOR)
        rows, credit = credited(exps, self._config)
        added = credit.metrics | _span(exps) | {"train/rows": float(len(rows))}
        await collector.end_step.remote(step, groups, credit.episodes, False, added)
        return rows, {}

    def __call__(self, exps: Any, **_: Any) -> Any:
        raise NotImplementedError("computed in the pipeline, not in the trainer")

    @classmethod
    def compute_in_trainer(cls) -> bool:
        return False

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


def credited(exps: list[Experience], config: Config) -> tuple[list[Experience], BatchCredit]:
    """The experiences that are trained, with their credit: advantages, and weights where Trinity has returns. At least
    one, of weight 0: the trainer waits for each batch."""
    exps = ordered(exps)
    credit = credit_batch(
        [exp.info[ROW] for exp in exps],
        [tag_of(exp) for exp in exps],
        credit_settings(config),
        imitate_from=imitate_from(config),
    )
    kept = []
    for exp, advantages, weights, trained in zip(exps, credit.advantages, credit.weights, credit.trained, strict=True):
        if trained:
            exp.advantages, exp.returns = torch.from_numpy(advantages), torch.from_numpy(weights)
            kept.append(exp)
    name = uuid.uuid4().hex
    for exp in kept:
        exp.info[BATCH] = [name, len(kept)]
    return kept, credit


def _span(exps: list[Experience]) -> dict[str, float]:
    """When this batch's rollout began and ended: shows whether it overlapped with training."""
    spans = [exp.info[SPAN] for exp in exps]
    return {
        "time/rollout_began": min(begin for begin, _ in spans),
        "time/rollout_ended": max(end for _, end in spans),
    }


class WholeBatches(SampleStrategy):  # type: ignore[misc]
    """`ranks`: data-parallel ranks of the trainer. `updates`: of a step.

    `max_staleness` is for our explorer, which reads it from here.
    """

    def __init__(
        self,
        buffer_config: BufferConfig,
        *,
        ranks: int = 1,
        updates: int = 1,
        norm: str = "token_mean",
        seed: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(buffer_config)
        self._reader = get_buffer_reader(buffer_config.trainer_input.experience_buffer)
        self._ranks, self._updates, self._norm, self._seed = ranks, updates, LossNorm(norm), seed
        self._waiting: dict[str, list[Experience]] = {}

    async def sample(self, step: int, **_: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        metrics: dict[str, float] = {}
        with Timer(metrics, "time/read_experience"):
            rows = await self._whole()
        metrics["sample/rows"] = float(len(rows))
        examples = representative_sample(rows)
        seed = (self._seed, (step - 1) * self._updates)
        placed = in_place(rows, norm=self._norm, updates=self._updates, ranks=self._ranks, seed=seed)
        return placed, metrics, examples

    async def _whole(self) -> list[Experience]:
        while True:
            missing = {name: rows[0].info[BATCH][1] - len(rows) for name, rows in self._waiting.items()}
            for name, count in missing.items():
                if count == 0:
                    return self._waiting.pop(name)
            wanted = min(missing.values()) if missing else 1
            for exp in await self._reader.read(batch_size=wanted):
                self._waiting.setdefault(exp.info[BATCH][0], []).append(exp)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"ranks": 1, "updates": 1, "norm": "token_mean", "seed": 0, "max_staleness": None}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._reader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._reader.load_state_dict(state_dict)


def in_place(
    rows: list[Experience], *, norm: LossNorm, updates: int, ranks: int, seed: Sequence[int]
) -> list[Experience]:
    """The rows where Trinity's trainer expects those of each update, with their weights in it; in between, copies of
    the shortest that train nothing."""
    layout = lay_out(
        [
            BatchRow(row.info[ROW].rsplit("_", 1)[0], len(row.tokens), int(torch.count_nonzero(row.returns)))
            for row in rows
        ],
        norm=norm,
        updates=updates,
        ranks=ranks,
        multiple=1,
        seed=seed,
    )
    for row, scale in zip(rows, layout.scales, strict=True):
        row.returns = row.returns * scale
    shortest = min(rows, key=lambda row: len(row.tokens))
    placed = [_blank(shortest) if index is None else rows[index] for index in layout.order]
    for row in placed:
        row.info[UPDATES] = len(placed) // layout.size
    return placed


def _blank(like: Experience) -> Experience:
    blank = deepcopy(like)
    blank.action_mask = torch.zeros_like(like.action_mask)
    blank.advantages = torch.zeros_like(like.advantages)
    blank.returns = torch.zeros_like(like.returns)
    blank.info |= {SEGMENTS: [], VERSIONS: []}
    return blank
