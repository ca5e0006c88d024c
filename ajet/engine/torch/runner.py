"""`Runner`: one forward pass over the new tokens of many sequences; returns the logits that replies are drawn from.

When it is made, it checks whether the model can be served: the model must compute attention through transformers'
interface, with keys of the same shape in all layers, and give the logits of its own forward pass, beyond every window
that one of its layers has.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ajet.attention_rules import REFUSALS, LayerShape, describe_refusal, layer_shapes, length_dependent_rope
from ajet.engine.torch.attention import StepLayout, serving
from ajet.engine.torch.kv_cache import KVPool, KVShape
from ajet.engine.torch.readers import Part
from ajet.schema.errors import FeatureUnavailableError

PROBE_TOKENS = 24
"""Tokens of the comparison, beyond the longest window."""
COMPARED = 4
"""The last tokens of the comparison, whose logits are compared."""
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""How far the engine's logits may be from the model's own: room for rounding, not for a wrong position or mask."""


@dataclass(frozen=True, slots=True)
class Work:
    """The new tokens of one sequence in this step, and whether a token is drawn after the last of them."""

    part: Part
    tokens: list[int]
    draws: bool


class Runner:
    """Runs a model over the tokens of many sequences at once."""

    def __init__(self, model: PreTrainedModel, longest: int | None = None) -> None:
        """`longest`: tokens that a conversation may have; windows beyond are not tried."""
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        parameters = inspect.signature(model.forward).parameters
        self._picks_logits = "logits_to_keep" in parameters
        config: Any = model.config.get_text_config()
        self.vocabulary = int(config.vocab_size)

        layers = _layers(model)
        self.kv_shape = _kv_shape(model, layers)
        self.visibility = [layer.rule.visibility for layer in layers]
        windows = [seen.size for seen in self.visibility if longest is None or seen.hides_within(longest)]
        _check_against_own_forward(self, max(windows, default=0) + PROBE_TOKENS)

    def forward(self, rows: list[Work], chunks: list[Work], pad_to: int = 0) -> torch.Tensor:
        """Logits (float32) of the work that draws, rows first.

        With `pad_to`, a step goes through every matrix with exactly that many tokens, and each row reads its context
        by itself.
        """
        work = [*rows, *chunks]
        if not pad_to:
            rows, chunks = _side_by_side(rows), _side_by_side(chunks)
        tokens: list[int] = []
        positions: list[int] = []
        last: dict[int, int] = {}
        for item in (*rows, *chunks):
            tokens += item.tokens
            positions += range(item.part.context, item.part.end)
            last[id(item)] = len(tokens) - 1
        picks = [last[id(item)] for item in work if item.draws]
        padding = [0] * max(0, pad_to - len(tokens))
        parts = [item.part for item in rows], [item.part for item in chunks]
        layout = StepLayout(*parts, self.visibility, apart=pad_to > 0)
        drawing = len(picks)
        if pad_to and rows:
            picks += [0] * (pad_to - drawing)
        return self.logits(tokens + padding, positions + padding, layout, picks)[:drawing]

    def rows_are_alike(self, width: int) -> bool:
        """Whether equal rows of a step come out equal to the last bit, wherever they are in the batch."""
        logits = self.logits([1] * width, [0] * width, StepLayout([], []), list(range(width)))
        return bool((logits == logits[0]).all())

    def logits(self, tokens: list[int], positions: list[int], layout: StepLayout, picks: list[int]) -> torch.Tensor:
        """Logits after the picked tokens of one packed row."""
        device = self.device
        extra: dict[str, Any] = {}
        picked = torch.tensor(picks, dtype=torch.long, device=device)
        if self._picks_logits:
            extra["logits_to_keep"] = picked
        with serving(self.model):
            output = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                layout=layout,
                **extra,
            )
        logits: torch.Tensor = output.logits[0]
        if not self._picks_logits:
            logits = logits[picked]
        return logits.float()


def _side_by_side(work: list[Work]) -> list[Work]:
    """Ordered as in the slabs: what is read together is then contiguous in the step's row."""
    slabs: dict[int, int] = {}
    for item in work:
        slabs.setdefault(id(item.part.kv.slab), len(slabs))
    return sorted(work, key=lambda item: (slabs[id(item.part.kv.slab)], item.part.kv.slot))


def _unservable(model: PreTrainedModel, why: str) -> FeatureUnavailableError:
    return FeatureUnavailableError(
        f"the embedded engine can't serve {type(model).__name__}: {why}. Use rollout.engine: vllm for this model"
    )


def _layers(model: PreTrainedModel) -> list[LayerShape]:
    """All layers in their order."""
    if (kind := length_dependent_rope(model)) is not None:
        raise _unservable(model, f"its rotary embedding ({kind}) depends on the length of a batch")
    try:
        layers = sorted(layer_shapes(model), key=lambda layer: layer.layer)
    except REFUSALS as error:
        raise _unservable(model, describe_refusal(model, error)) from error
    if [layer.layer for layer in layers] != list(range(len(layers))) or not layers:
        raise _unservable(model, "not every layer computes its attention through transformers' attention interface")
    return layers


def _kv_shape(model: PreTrainedModel, layers: list[LayerShape]) -> KVShape:
    shapes = {(layer.key_heads, layer.key_size, layer.value_size) for layer in layers}
    if len(shapes) != 1:
        raise _unservable(model, "its layers have keys of different shapes")
    return KVShape(len(layers), *shapes.pop())


def _check_against_own_forward(runner: Runner, length: int) -> None:
    """A sequence computed beside another, in chunks and rows, must give the logits of the model's own forward pass."""
    model, device = runner.model, runner.device
    tokens = [(7 * index + 3) % runner.vocabulary for index in range(length)]
    keep: dict[str, Any] = {"logits_to_keep": COMPARED} if runner._picks_logits else {}
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([tokens], device=device), use_cache=False, **keep).logits[0, -COMPARED:]
    pool = KVPool(runner.kv_shape, runner.dtype, device, 4 * length + 1024)
    first, second = pool.allocate(length, 2 * length), pool.allocate(length, 2 * length)
    assert first is not None and second is not None
    other = tokens[::-1]
    ours = []
    done = 0
    for count in (length - COMPARED - 3, 4, 1, 1, 1):  # a long chunk, a short one, and rows
        mine = Work(Part(first, done, count), tokens[done : done + count], True)
        its = Work(Part(second, done, count), other[done : done + count], False)
        both = [its, mine]
        ours.append(runner.forward(both, []) if count == 1 else runner.forward([], both))
        done += count
    difference = float((own.float() - torch.cat(ours[1:])).abs().max())
    if not difference <= PROBE_TOLERANCE.get(runner.dtype, 1e-3):
        raise _unservable(model, f"its logits differ from those of its own forward pass by {difference:.3g}")
