"""Whether a model computes trees correctly. One that doesn't is trained in rows: that is slower but never wrong.

`tree_support(model)` judges by the configuration, `check_trees(model, items)` by comparing: the batch's own calls as a
tree and as flat rows, forward and backward; and, if a layer has a window that these don't reach, a made-up tree that
goes beyond it. `check_same` compares any two ways to compute the same packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ajet.attention_rules import REFUSALS, describe_refusal, layer_shapes, length_dependent_rope
from ajet.schema.call_tree import ROOT, Call, CallTree, Run
from ajet.trainer.forward import Forward, PackForward, RowForward
from ajet.trainer.pack import Item, Layout, make_packs

RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm", "gated_delta", "hybrid")
"""Layer types in transformers' `config.layer_types` that carry a state from token to token."""

CHECK_TOKENS = 2048
"""Size of the comparison, in tokens of flat rows."""

BEYOND = 16
"""Tokens by which the made-up tree goes beyond the longest window, on each of its branches."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest accepted difference of logprobs (absolute) and of the gradient (relative to its norm).

A wrong mask causes a far larger difference, rounding in long rows a far smaller one.
"""


def tree_support(model: Any) -> str | None:
    """Why this model can't compute packed trees, judging by its configuration; None if it may be able to."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    recurrent = sorted({kind for kind in layer_types if any(word in str(kind) for word in RECURRENT)})
    if recurrent:
        return f"{type(base).__name__} has layers that carry a state from token to token ({', '.join(recurrent)})"
    if getattr(base, "_is_stateful", False):
        return f"{type(base).__name__} carries a state from token to token"
    if not getattr(base, "_supports_attention_backend", False) or not hasattr(base, "set_attn_implementation"):
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


def check_same(model: Any, items: Sequence[Item], one: Forward, other: Forward, layout: Layout) -> str | None:
    """Why `other` is no way to compute what `one` does: it differs, or fails. None if it is one."""
    try:
        return _difference(model, _first(items), (other, layout), (one, layout), gradients=True)
    except (*REFUSALS, RuntimeError) as error:  # a compiler's errors are RuntimeErrors
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _first(items: Sequence[Item]) -> list[Item]:
    """As many of them as are compared."""
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


Way = tuple[Forward, Layout]

TREE_AND_ROWS: tuple[Way, Way] = (PackForward(), Layout.TREE), (RowForward(), Layout.FLAT)


def _difference(model: Any, items: Sequence[Item], one: Way, other: Way, *, gradients: bool) -> str | None:
    values, gradient = _run(model, *one, items, gradients=gradients)
    expected, expected_gradient = _run(model, *other, items, gradients=gradients)
    tolerance = TOLERANCE[next(model.parameters()).dtype]
    gap = float((values - expected).abs().max())
    norm = max(_norm(expected_gradient), 1e-12)
    off = _norm([a - b for a, b in zip(gradient, expected_gradient, strict=True)])
    if gap <= tolerance and off <= tolerance * norm:
        return None
    return f"logprobs differ by up to {gap:.2g} and gradients by {off / norm:.2g} of their norm"


def _norm(gradients: Sequence[torch.Tensor]) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm()) if gradients else 0.0


def _run(
    model: Any, forward: Forward, layout: Layout, items: Sequence[Item], *, gradients: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logprobs, and the gradient of their mean if it is asked for."""
    (pack,) = make_packs(items, layout)
    with forward.session(model), torch.set_grad_enabled(gradients):
        logprob_E = forward(model, pack).logprob_E
        if not gradients:
            return logprob_E, []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(logprob_E.mean(), trained, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
    return logprob_E.detach(), [gradient.float() for gradient in filled]


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
