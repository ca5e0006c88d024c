"""How a batch is computed: packs by a cost model, trees or rows; each way is checked on the first batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from ajet.engine.attention_rules import REFUSALS, describe_refusal, layer_shapes, length_dependent_rope
from ajet.engine.layers import carries_state, causal_model, stated_kinds
from ajet.engine.quantization import parameter_count
from ajet.schema.episode import ROOT, Call, CallTree, Run
from ajet.trainer.attention import can_branch
from ajet.trainer.credit.estimators import EpisodeCredit
from ajet.trainer.forward import (
    PackForward,
    RowForward,
    layers_to_compile,
    padded_tokens,
    row_batches,
    why_not_liger,
)
from ajet.trainer.pack import Item, Layout, Pack, items_of, make_packs

log = logging.getLogger("ajet.trainer")


@contextmanager
def checkpointing(model: Any) -> Iterator[None]:
    """Inside it (forward *and* backward), the layers are computed again in the backward pass, and keep nothing.

    transformers does so in training mode only, in which a layer's own code may drop something. It is left before that
    code runs: the policy that is trained is the one that was sampled.
    """
    layers = layers_to_compile(model)
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(_checkpoint, layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False


def _checkpoint(layer: Any, call: Any, *inputs: Any) -> Any:
    def own(*inputs: Any) -> Any:
        before, layer.training = layer.training, False
        try:
            return call(*inputs)
        finally:
            layer.training = before

    return checkpoint(own, *inputs, use_reentrant=False)


CHECK_TOKENS = 2048
"""Size of the comparison, in tokens of flat rows."""

BEYOND = 16
"""Tokens by which the made-up tree goes beyond the longest window, on each of its branches."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest accepted difference of logprobs (absolute) and of the gradient (relative to its norm).

A wrong mask causes a far larger difference, rounding in long rows a far smaller one.
"""


def carried_state(model: Any) -> str | None:
    """Which layers carry a state from token to token; None if none do."""
    base = causal_model(model)
    kinds = sorted(set(filter(carries_state, stated_kinds(base))))
    if not kinds and not getattr(base, "_is_stateful", False):
        return None
    return f"{type(base).__name__} carries a state from token to token" + (f" ({', '.join(kinds)})" if kinds else "")


def tree_support(model: Any) -> str | None:
    """Why this model can't compute packed trees, judging by its layers; None if it may be able to."""
    base = causal_model(model)
    state = carried_state(base)
    if state is not None:
        if not can_branch(base):
            return state
    elif not getattr(base, "_supports_attention_backend", False) or not hasattr(base, "set_attn_implementation"):
        return f"{type(base).__name__} does not use transformers' attention interface"
    if (kind := length_dependent_rope(base)) is not None:
        return f"{type(base).__name__}'s rotary embedding ({kind}) depends on the length of a row"
    return None


def check_trees(model: Any, items: Sequence[Item]) -> str | None:
    """What differs between trees and flat rows, or None."""
    chosen = _first(items)
    try:
        window = max((layer.rule.visibility.size for layer in layer_shapes(model)), default=0)
        why = _difference_or_rounding(model, chosen, gradients=True)
        if why is None and max(item.row_tokens for item in chosen) < window + BEYOND:
            why = _difference_or_rounding(model, _beyond(window), gradients=False)
            why = why and f"beyond the window of {window} tokens, {why}"
    except REFUSALS as error:
        return describe_refusal(model, error)
    return why


def check_same(model: Any, items: Sequence[Item], one: RowForward, other: RowForward, layout: Layout) -> str | None:
    """Why `other` is no way to compute what `one` does: it differs, or fails. None if it is one."""
    try:
        return _difference(model, _first(items), (other, layout), (one, layout), gradients=True)
    except (*REFUSALS, RuntimeError) as error:  # a compiler's errors are RuntimeErrors
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _first(items: Sequence[Item]) -> list[Item]:
    """Take as many of them as are compared."""
    chosen: list[Item] = []
    tokens = 0
    for item in items:
        if chosen and tokens + item.row_tokens > CHECK_TOKENS:
            break
        chosen.append(item)
        tokens += item.row_tokens
    return chosen


def _difference_or_rounding(model: Any, items: Sequence[Item], *, gradients: bool) -> str | None:
    """What differs. In half precision, a difference counts if it is there in float32, too: a mixture of experts may
    send a token elsewhere for a rounding error."""
    why = _difference(model, items, *TREE_AND_ROWS, gradients=gradients)
    if why is None or next(model.parameters()).dtype not in (torch.bfloat16, torch.float16):
        return why
    try:
        with _in_float32(model):
            return _difference(model, items, *TREE_AND_ROWS, gradients=gradients)
    except torch.OutOfMemoryError:
        return f"{why}, and there is no memory to repeat this in float32"


Way = tuple[RowForward, Layout]

TREE_AND_ROWS: tuple[Way, Way] = (PackForward(), Layout.TREE), (RowForward(), Layout.FLAT)


def _difference(model: Any, items: Sequence[Item], one: Way, other: Way, *, gradients: bool) -> str | None:
    values, gradient = _computed(model, *one, items, gradients=gradients)
    gradient = [each.cpu() for each in gradient]  # a GPU may have no room for two gradients of all weights
    expected, expected_gradient = _computed(model, *other, items, gradients=gradients)
    tolerance = TOLERANCE[next(model.parameters()).dtype]
    gap = float((values - expected).abs().max())
    norm = max(_norm(expected_gradient), 1e-12)
    off = _norm(_exact(a.to(b.device)) - _exact(b) for a, b in zip(gradient, expected_gradient, strict=True))
    if gap <= tolerance and off <= tolerance * norm:
        return None
    return f"logprobs differ by up to {gap:.2g} and gradients by {off / norm:.2g} of their norm"


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(float(_exact(gradient).norm()) for gradient in gradients))


def _exact(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _computed(
    model: Any, forward: RowForward, layout: Layout, items: Sequence[Item], *, gradients: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logprobs, and the gradient of their mean if it is asked for."""
    (pack,) = make_packs(items, layout)
    with forward.session(model), torch.set_grad_enabled(gradients):
        logprob_E = forward(model, pack).logprob_E
        if not gradients:
            return logprob_E, []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(logprob_E.mean(), trained, allow_unused=True)
    return logprob_E.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Inside, the model computes in float32. Widening is exact, so afterwards its weights are what they were."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [(tensor, tensor.data) for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]
    try:
        for tensor, data in before:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _beyond(window: int) -> list[Item]:
    """Two calls that share more than half a window, each with a path that is longer than the window."""
    rng = np.random.default_rng(0)
    shared, own = window // 2 + 1, window // 2 + BEYOND

    def ids(count: int) -> Any:
        return rng.integers(0, 16, count).astype(np.int32)

    tree = CallTree([Run(ids(shared), ROOT, 0)])
    for index in range(2):
        mask = np.zeros(own, np.bool_)
        mask[-BEYOND // 2 :] = True
        tree.runs.append(Run(ids(own), 0, shared, call=index))
        logprobs = np.zeros(own, np.float32)
        tree.calls.append(Call(f"probe-{index}", "a", "t", 0, 0, shared, len(tree.runs) - 1, logprobs, mask))
    return [Item(tree, 0, index, 0, [(1.0, 1.0)]) for index in range(2)]


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of a pack's forward and backward pass: seconds, up to a common factor."""

    token: float
    """One token through all layers."""
    pair: float
    """One query-key pair in all layers."""
    block: float
    """One attention block in all layers, on top of its pairs."""
    batch: float = 0.0
    """One batch of rows, on top of its tokens."""

    @classmethod
    def of(cls, model: Any) -> CostModel:
        """The model's costs in floating point operations; fixed costs as the operations that would take as long."""
        config = model.config.get_text_config()
        layers = config.num_hidden_layers
        heads = getattr(config, "num_attention_heads", 0)  # 0: no layer attends
        head_size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        embedding = config.vocab_size * config.hidden_size
        weights = max(sum(map(parameter_count, model.parameters())) - embedding, 1)
        # forward + backward: 6 per weight, 14 per pair and channel, at the same speed (measured)
        pair = 14.0 * layers * heads * head_size
        return cls(token=6.0 * weights, pair=pair, block=BLOCK_OPERATIONS * layers, batch=BATCH_OPERATIONS * layers)

    def estimate(self, packs: Sequence[Pack], budget: int = 1 << 30) -> float:
        """The cost of all packs: trees as one sequence, others as padded rows."""
        total = 0.0
        for pack in packs:
            if pack.layout is not Layout.TREE:
                lengths = [end - start for start, end in pack.rows]
                total += padded_tokens(pack, budget) * self.token
                total += sum(length**2 / 2 for length in lengths) * self.pair
                total += len(row_batches(pack, budget)) * self.batch
                continue
            blocks = pack.blocks
            pairs = sum((end - start) ** 2 / 2 for start, end in blocks.causal)
            pairs += sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in blocks.full)
            total += (len(pack) * self.token + pairs * self.pair) * PACK_OVERHEAD
            total += (len(blocks.causal) + len(blocks.full)) * self.block
        return total


BLOCK_OPERATIONS = 2.0e6
"""Fixed cost of a block in one layer, forward and backward (about 80 µs at 25 GFLOP/s, measured on one CPU core)."""

PACK_OVERHEAD = 1.1
"""A tree's tokens cost a little more than those of padded rows: its rows are gathered and joined (measured)."""

BATCH_OPERATIONS = 5.0e6
"""Fixed cost of a batch of rows in one layer, forward and backward."""


def rows_for(model: Any) -> Layout:
    """The rows in which this model computes a token as it did when it was sampled.

    If the rotary embedding depends on the length of a row, a later call in the same row would change earlier ones.
    """
    return Layout.MERGED if length_dependent_rope(model) is None else Layout.FLAT


def plan(items: Sequence[Item], costs: CostModel, budget: int | None, layouts: Sequence[Layout]) -> list[Pack]:
    """The packs in whichever of these layouts should be fastest."""
    candidates = [make_packs(items, layout, budget) for layout in layouts]
    return min(candidates, key=lambda packs: costs.estimate(packs, budget or 1 << 30))


def follow_sampler(packs: Sequence[Pack], items: Sequence[Item]) -> None:
    """Give the packs the experts that the sampler chose, where they were noted."""
    trees = {item.episode: item.tree for item in items}
    for pack in packs:
        for (episode, call), edges in pack.edges.by_call():
            noted = trees[episode].experts_of(call)
            if noted is None:
                continue
            if pack.experts is None:
                pack.experts = np.full((len(pack), *noted.shape[1:]), -1, np.int16)
            last = int(pack.edges.position[edges].max())
            path = np.flatnonzero(pack.ends[: last + 1] > last)
            known = noted[: len(path)]
            pack.experts[path[: len(known)]] = known


class Chosen(NamedTuple):
    """How packs are run, and in which layouts."""

    forward: RowForward
    layouts: tuple[Layout, ...]


def choose(
    model: Any, items: Sequence[Item], budget: int, chunk: int | None, *, liger: bool = False, compiled: bool = False
) -> Chosen:
    """Trees, unless the model can't compute them or its first trees differ from rows; with Liger's kernel and compiled
    layers, if they are asked for and give the same."""
    why = tree_support(model) or check_trees(model, items)
    if why is not None:
        log.warning("training in rows, without sharing between branches: %s", why)
    plain = RowForward(budget, chunk) if why is not None else PackForward(budget, chunk)
    layout = Layout.FLAT if why is not None else Layout.TREE
    forward = plain
    if liger:
        fused = replace(plain, liger=True)
        if (why_not := why_not_liger(model) or check_same(model, items, plain, fused, layout)) is None:
            forward = fused
        else:
            log.warning("training without Liger's kernel: %s", why_not)
    if compiled:
        faster = replace(forward, compiled=True)
        why_not = None if layers_to_compile(model) else f"{type(model).__name__} doesn't mark its layers"
        if (why_not := why_not or check_same(model, items, forward, faster, layout)) is None:
            forward = faster
        else:
            log.warning("training without compiled layers: %s", why_not)
    rows = rows_for(model)
    return Chosen(forward, (Layout.TREE, rows) if why is None else (rows,))


Logprobs = dict[tuple[int, int], NDArray[np.float64]]
"""Logprobs of calls' trained tokens, by (episode of the batch, call)."""


def logprobs_of(packs: Sequence[Pack], forward: RowForward, model: Any) -> Logprobs:
    """Compute those of all trained tokens. Call this only inside a session of this model."""
    known: Logprobs = {}
    with torch.no_grad():
        for pack in packs:
            values = forward(model, pack).logprob_E.double().cpu().numpy()
            known.update((key, values[where]) for key, where in pack.edges.by_call())
    return known


class ModelTeacher:
    """A Hugging Face causal model."""

    def __init__(self, model: Any, budget: int) -> None:
        self._model = model
        self._costs = CostModel.of(model)
        self._budget = budget
        """Tokens per forward pass."""

    def logprobs(self, batch: Sequence[tuple[CallTree, EpisodeCredit]]) -> Logprobs:
        """The log-probabilities of all trained tokens, each at the temperature of its call."""
        items = items_of(batch)
        packs = plan(items, self._costs, self._budget, [rows_for(self._model)])
        return logprobs_of(packs, RowForward(self._budget), self._model)
