"""What each attention layer of a Hugging Face model computes: which tokens a token sees, and how scores become shares.

Engine and trainer replace a model's attention by their own, so they have to know its rules. `layer_rules(model)` reads
them where the model itself states them: from the mask that it asks transformers for in each layer, and from the
arguments of its attention function. Windows are counted in positions, so the same rule holds in a row and in a tree.

Shapes: B batch, H heads, M queries, C keys, D head size, N tokens.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ajet.engine.layers import causal_model


class UnsupportedAttentionError(Exception):
    """The model's attention needs something that isn't computed here."""


REFUSALS = (UnsupportedAttentionError, TypeError, AttributeError, ValueError)
"""What a model raises that doesn't take our keyword arguments, or does something else with a mask than pass it on."""


def describe_refusal(model: Any, error: BaseException) -> str:
    """Which part of the model can't work with another attention, and what was raised there."""
    names = {id(module): name for name, module in model.named_modules()}
    raised_in = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    owner = next((each for each in reversed(raised_in) if id(each) in names), model)
    what = str(error)
    if not isinstance(error, UnsupportedAttentionError):
        what = f"it does something else with its mask or arguments than pass them on ({what})"
    return type(owner).__name__ + (f" ({names[id(owner)]})" if names.get(id(owner)) else "") + f": {what}"


class Sight(StrEnum):
    """How far back a token sees."""

    ALL = "all"
    WINDOW = "window"
    """The last `size` tokens, itself included."""
    CHUNK = "chunk"
    """The tokens of its own chunk: positions are cut at multiples of `size`."""


class Visibility(NamedTuple):
    """Which earlier positions a token sees."""

    sight: Sight
    size: int = 0

    def first(self, position: Any) -> Any:
        """The first position that the token at this position sees, of a number or a tensor; may be below 0."""
        if self.sight is Sight.WINDOW:
            return position - self.size + 1
        if self.sight is Sight.CHUNK:
            return position // self.size * self.size
        return position * 0

    def hides_within(self, length: int) -> bool:
        """Whether some token of a path of this length doesn't see all before it."""
        return self.sight is not Sight.ALL and self.size < length


ALL = Visibility(Sight.ALL)


class Rule(NamedTuple):
    """How one layer attends."""

    visibility: Visibility = ALL
    scale: float | None = None
    """None: 1 / √D."""
    softcap: float | None = None
    """Scores are bent to stay between ± this."""
    sinks_H: Tensor | None = None
    """Each head's score of a key that everyone sees, and that has no value."""

    @classmethod
    def of(cls, visibility: Visibility, scale: float | None, options: dict[str, Any]) -> Rule:
        """Read the rule from the arguments that a model passes to its attention function."""
        if options.get("position_bias") is not None:
            raise UnsupportedAttentionError("a bias that depends on the distance of two tokens")
        return cls(visibility, scale, options.get("softcap"), options.get("s_aux"))


# ------------------------------------------------------------ reading the rules of a model

NAME = "ajet_rules"
"""The attention implementation under which a model shows its rules."""

WINDOW_KEYS = ("sliding_window", "attention_chunk_size", "local_size", "window_size")
"""Where configurations name windows."""

PROBE_TOKENS = 7


class LayerShape(NamedTuple):
    """The rule of a layer, and the shape of its keys and values."""

    layer: int | None
    """None: a module that several layers share."""
    key_heads: int
    key_size: int
    value_size: int
    rule: Rule


def visibility_of_mask(
    *, mask_function: Callable[..., Any], config: Any = None, local_size: int | None = None, **_other: Any
) -> Visibility:
    """Return the rule of a mask instead of the mask itself. transformers calls this for each kind of mask that a model
    needs."""
    named = [getattr(config, key, None) for key in WINDOW_KEYS]
    sizes = [size for size in (local_size, *named) if isinstance(size, int) and size >= 0]
    device = _other.get("device")
    if device is not None and torch.device(device).type == "meta":
        device = None  # without weights, the rule is the same
    asking, seen = _probe_positions(max(sizes, default=0) or 8, device)
    nothing = torch.zeros((), dtype=torch.long, device=device)
    shown = mask_function(nothing, nothing, asking, seen)
    windows = [Visibility(Sight.WINDOW, size) for size in sizes]  # of 0: Qwen2-MoE's for layers that it hasn't
    for found in (ALL, *windows, *(Visibility(Sight.CHUNK, size) for size in sizes if size)):
        if torch.equal(shown.expand(len(asking), seen.shape[1]), (seen <= asking) & (seen >= found.first(asking))):
            return found
    raise UnsupportedAttentionError("a mask that is neither causal nor a window nor made of chunks")


def _probe_positions(size: int, device: Any) -> tuple[Tensor, Tensor]:
    """Queries around the first edges of a window or chunk, and all keys up to there."""
    edges = [edge + step for edge in (0, size // 2, size, 2 * size, 2 * size + size // 2) for step in (-1, 0, 1)]
    asking = torch.tensor([[place] for place in edges if place >= 0], device=device)
    return asking, torch.arange(int(asking.max()) + 2, device=device)[None]


def visibility_of(mask: Any) -> Visibility:
    """What a layer was given as its mask, if `visibility_of_mask` made it; without a mask, plain causality."""
    if mask is None:
        return ALL
    if not isinstance(mask, Visibility):
        raise UnsupportedAttentionError("the model makes its masks itself")
    return mask


def layer_shapes(model: Any) -> list[LayerShape]:
    """Shapes and rules of all layers that use transformers' attention interface, in the order they are computed."""
    found: list[LayerShape] = []
    base = causal_model(model)
    tokens = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device)[None]
    seen = None if tokens.is_meta else torch.ones_like(tokens)  # models ask whether a mask hides anything
    with probing(base):
        base(input_ids=tokens, attention_mask=seen, use_cache=False, ajet_layers=found)
    return found


@contextmanager
def probing(model: Any) -> Iterator[None]:
    """Inside, the model shows its rules instead of attending, also if it has no weights (PyTorch's `meta` device)."""
    _register()
    with torch.no_grad(), attending(model, NAME), one_sequence():
        yield


@contextmanager
def one_sequence() -> Iterator[None]:
    """Inside, transformers doesn't look for several sequences in a row: on `meta` there are no positions to look at."""
    from transformers import masking_utils

    masks: Any = masking_utils
    packed = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda _positions: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = packed


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """Inside, the model computes attention by the implementation of this name."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _show_rule)
    AttentionMaskInterface.register(NAME, visibility_of_mask)


def _show_rule(
    module: Any,
    query_BHMD: Tensor,
    key_BGCD: Tensor,
    value_BGCD: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    ajet_layers: list[LayerShape] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if ajet_layers is None:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention function"
        )
    rule = Rule.of(visibility_of(attention_mask), scaling, options)
    sizes = key_BGCD.shape[1], key_BGCD.shape[3], value_BGCD.shape[3]
    ajet_layers.append(LayerShape(getattr(module, "layer_idx", None), *sizes, rule))
    batch, heads, queries = query_BHMD.shape[:3]
    return query_BHMD.new_zeros(batch, queries, heads, value_BGCD.shape[3]), None


LENGTH_DEPENDENT = ("dynamic", "longrope")


class ChangingRope(NamedTuple):
    """A rotary embedding that is another one in long rows."""

    kind: str
    until: int
    """The most tokens of a row that counts as short."""


def changing_rope(config: Any) -> ChangingRope | None:
    """Read a model's configuration. None: its rope never changes."""
    text = config.get_text_config()
    stated: Any = getattr(text, "rope_parameters", None) or {}
    for each in (stated, *(layers for layers in stated.values() if isinstance(layers, dict))):
        if (kind := each.get("rope_type")) in LENGTH_DEPENDENT:
            original = each.get("original_max_position_embeddings") if kind == "longrope" else None
            return ChangingRope(kind, original or text.max_position_embeddings)
    return None


def length_dependent_rope(model: Any) -> str | None:
    """The type of a rotary embedding that changes with the length of a batch; None if it doesn't."""
    base = causal_model(model)
    if (stated := changing_rope(base.config)) is None:
        return None
    kinds = [module.rope_type for module in base.modules() if hasattr(module, "rope_type")]
    return None if kinds and all(kind == "default" for kind in kinds) else stated.kind


def fix_longrope(model: Any, longest: int) -> None:
    """Have rows of every length use the longrope factors of one length, as vLLM does with its `max_model_len`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            made = ROPE_INIT_FUNCTIONS["longrope"](module.config, module.inv_freq.device, seq_len=longest)
            module.inv_freq, module.attention_scaling = made
            module.rope_type = "default"


def forget_lengths(model: Any) -> None:
    """Have rotary embeddings with dynamic scaling follow the next row alone: they keep the scale of the longest one."""
    for module in model.modules():
        if "dynamic" in getattr(module, "rope_type", ""):
            module.max_seq_len_cached = 0


def query_correction(module: Any, positions_N: Tensor) -> Tensor | None:
    """Factors [N, 1] for the queries of layers that scale them by their index in the row instead of their position.

    Llama 4 does so in the layers without rotary embedding. None: the layer doesn't.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None

    def factor(position: Tensor) -> Tensor:
        steps = torch.floor((position.float() + 1.0) / float(module.floor_scale))
        return torch.log1p(steps) * float(module.attn_scale) + 1.0

    ratio_N: Tensor = factor(positions_N) / factor(torch.arange(len(positions_N), device=positions_N.device))
    return ratio_N[:, None]


# ------------------------------------------------------------ attention, written out


def _scores(query_BHMD: Tensor, key_BHCD: Tensor, added: Tensor | None, scale: float, cap: float | None) -> Tensor:
    """[B, H, M, C]. `added` is -inf where a query does not see a key, else 0."""
    exact = torch.promote_types(query_BHMD.dtype, torch.float32)
    scores = query_BHMD.to(exact) @ key_BHCD.to(exact).transpose(-1, -2) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    return scores if added is None else scores + added.to(exact)


def attend(
    query_BHMD: Tensor, key_BHCD: Tensor, value_BHCD: Tensor, added: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """What the queries read, and the log-sum-exp of their scores: the plain formula, for rules without a kernel."""
    scores = _scores(query_BHMD, key_BHCD, added, scale, cap)
    lse_BHM = scores.logsumexp(-1)
    share = (scores - lse_BHM[..., None]).exp()
    return (share @ value_BHCD.to(share.dtype)).to(query_BHMD.dtype), lse_BHM


def attend_backward(
    grad_BHMD: Tensor,
    query_BHMD: Tensor,
    key_BHCD: Tensor,
    value_BHCD: Tensor,
    output_BHMD: Tensor,
    lse_BHM: Tensor,
    added: Tensor | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, where output and log-sum-exp may be over more keys than these."""
    inputs = [each.detach().requires_grad_() for each in (query_BHMD, key_BHCD, value_BHCD)]
    query, key, value = inputs
    with torch.enable_grad():
        share = (_scores(query, key, added, scale, cap) - lse_BHM[..., None]).exp()
        read = share @ value.to(share.dtype)
    grad = grad_BHMD.to(share.dtype)
    # all shares of a query add up to one: what a key gains, the others lose
    lost = (grad * output_BHMD.to(share.dtype)).sum(-1, keepdim=True).expand_as(share)
    return torch.autograd.grad((read, share), inputs, (grad, -lost))
