"""`Runner`: one forward pass over the new tokens of many sequences; returns the logits that replies are drawn from.

When it is made, it checks with a few tokens whether the model can be served: the model must compute attention through
transformers' interface, with the same shapes in all layers, and give the logits of its own forward pass.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from ajet.engine.torch.attention import Part, StepLayout, serving
from ajet.engine.torch.kv_cache import KVPool, KVShape
from ajet.schema.errors import FeatureUnavailableError

PROBE_TOKENS = 7
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

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        parameters = inspect.signature(model.forward).parameters
        self._picks_logits = "logits_to_keep" in parameters
        config: Any = model.config.get_text_config()
        self.vocabulary = int(config.vocab_size)

        self.kv_shape = _find_kv_shape(self)
        _check_against_own_forward(self)

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
        layout = StepLayout([item.part for item in rows], [item.part for item in chunks], apart=pad_to > 0)
        drawing = len(picks)
        if pad_to and rows:
            picks += [0] * (pad_to - drawing)
        return self.logits(tokens + padding, positions + padding, layout, picks)[:drawing]

    def rows_are_alike(self, width: int) -> bool:
        """Whether equal rows of a step come out equal to the last bit, wherever they are in the batch."""
        logits = self.logits([1] * width, [0] * width, StepLayout([], []), list(range(width)))
        return bool((logits == logits[0]).all())

    def logits(self, tokens: list[int], positions: list[int], layout: Any, picks: list[int] | None) -> torch.Tensor:
        """Logits after the picked tokens of one packed row; None picks all."""
        device = self.device
        extra: dict[str, Any] = {}
        picked = None if picks is None else torch.tensor(picks, dtype=torch.long, device=device)
        if self._picks_logits and picked is not None:
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
        if picked is not None and not self._picks_logits:
            logits = logits[picked]
        return logits.float()


def _side_by_side(work: list[Work]) -> list[Work]:
    """Ordered as in the slabs: what is read together is then contiguous in the step's row."""
    slabs: dict[int, int] = {}
    for item in work:
        slabs.setdefault(id(item.part.kv.slab), len(slabs))
    return sorted(work, key=lambda item: (slabs[id(item.part.kv.slab)], item.part.kv.slot))


class _Recorder:
    """A layout of one sequence without storage, which records the shapes of each layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, int, int, int]] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        self.layers.append((layer, key.shape[1], key.shape[3], value.shape[3]))
        gqa = query.shape[1] != key.shape[1]
        read = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
        return read.transpose(1, 2)


def _unservable(model: PreTrainedModel, why: str) -> FeatureUnavailableError:
    return FeatureUnavailableError(
        f"the embedded engine can't serve {type(model).__name__}: {why}. Use rollout.engine: vllm for this model"
    )


def _find_kv_shape(runner: Runner) -> KVShape:
    model = runner.model
    rope: Any = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise _unservable(model, f"its rotary embedding ({rope['rope_type']}) depends on the length of a batch")
    recorder = _Recorder()
    tokens = list(range(PROBE_TOKENS))
    try:
        runner.logits(tokens, tokens, recorder, None)
    except (TypeError, AttributeError, ValueError) as error:
        raise _unservable(model, str(error)) from error
    if sorted(layer for layer, *_ in recorder.layers) != list(range(len(recorder.layers))) or not recorder.layers:
        raise _unservable(model, "not every layer computes its attention through transformers' attention interface")
    shapes = {tuple(shape) for _, *shape in recorder.layers}
    if len(shapes) != 1:
        raise _unservable(model, "its layers have keys of different shapes")
    heads, key_size, value_size = shapes.pop()
    return KVShape(len(recorder.layers), heads, key_size, value_size)


def _check_against_own_forward(runner: Runner) -> None:
    """Two sequences computed in chunks and rows must give the logits of the model's own forward pass."""
    model, device = runner.model, runner.device
    tokens = [(7 * index + 3) % runner.vocabulary for index in range(PROBE_TOKENS)]
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0, -1].float()
    pool = KVPool(runner.kv_shape, runner.dtype, device, 1024)
    first, second = pool.allocate(PROBE_TOKENS, PROBE_TOKENS), pool.allocate(PROBE_TOKENS, PROBE_TOKENS)
    assert first is not None and second is not None
    other = tokens[::-1]
    runner.forward([], [Work(Part(first, 0, 3), tokens[:3], False), Work(Part(second, 0, 5), other[:5], False)])
    runner.forward([Work(Part(second, 5, 1), other[5:6], True)], [Work(Part(first, 3, 3), tokens[3:6], False)])
    ours = runner.forward([Work(Part(first, 6, 1), tokens[6:7], True)], [])[0]
    difference = float((own - ours).abs().max())
    if not difference <= PROBE_TOLERANCE.get(runner.dtype, 1e-3):
        raise _unservable(model, f"its logits differ from those of its own forward pass by {difference:.3g}")
