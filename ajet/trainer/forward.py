"""Computes the logprobs of a pack's edges, from hidden states through the model's output head. Nothing
else runs the model.

Two executors give the same result: `RowForward` cuts a pack without sharing into ordinary padded rows, `PackForward`
also computes trees, each as one sequence (see `attention`). Logits are computed only where an edge needs them, and if
there are many of them, chunk by chunk: the backward pass then computes them again, so that those of a whole pack never
exist together.

Shapes: E edges, P positions with logits, V vocabulary, B rows of a batch, N tokens of a row, W width of the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from ajet.engine.attention_rules import forget_lengths, length_dependent_rope
from ajet.engine.layers import causal_model, replaced
from ajet.engine.routing import ARGUMENT as ROUTES
from ajet.schema.errors import ConfigError, MissingDependencyError
from ajet.schema.install import install_command
from ajet.trainer.attention import attention_left_whole, pack_arguments, plan_attention, tree_attention
from ajet.trainer.pack import Floats, Indices, Layout, Pack

LOGITS_BYTES = 256 * 2**20
"""Most that the float32 logits of one chunk take by default: about 440 positions with a vocabulary of 152,000. That is
enough for the projection to be limited by arithmetic, not by reading its weights."""


def chunk_positions(vocabulary: int) -> int:
    """How many positions get their logits at once, unless something else is asked for."""
    return max(1, LOGITS_BYTES // (4 * vocabulary))


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The output of a model's last layer."""

    states_BNW: Tensor
    _model: Any
    _body: Any
    _output: ModelOutput
    _input_ids: Tensor

    @classmethod
    def of(cls, model: Any, arguments: dict[str, Any]) -> HiddenStates | None:
        """Run the model up to its output layer. None if the model can't be divided there."""
        causal = causal_model(model)
        body = causal.base_model
        if body is causal:
            return None
        found: list[Any] = []
        hook = body.register_forward_hook(lambda _body, _inputs, output: found.append(output))
        try:
            causal(**arguments, logits_to_keep=torch.zeros(1, dtype=torch.long, device=arguments["input_ids"].device))
        finally:
            hook.remove()
        if len(found) != 1 or not isinstance(found[0], ModelOutput) or "last_hidden_state" not in found[0]:
            return None
        return cls(found[0]["last_hidden_state"], causal, body, found[0], arguments["input_ids"])

    def logits(self, states_SW: Tensor) -> Tensor:
        """The logits [S, V] of some of the states."""
        output = type(self._output)(**{**self._output, "last_hidden_state": states_SW[None]})
        with replaced(self._body, lambda *_inputs, **_options: output):
            logits_SV: Tensor = self._model(input_ids=self._input_ids, use_cache=False, logits_to_keep=0).logits[0]
        return logits_SV


KEY = "ajet.trainer_common.logits_kernel"
AFTER_THE_PROJECTION = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of configurations whose models change the logits that the output layer gives."""


def require_liger(device: str) -> None:
    """Raise unless the kernel can run on a device of this kind (`cpu` or `cuda`)."""
    _function()
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"{KEY}: liger needs a CUDA GPU, and this run trains on the {device.upper()}: set it to chunks, which "
            "computes the same, or leave it out"
        )


def why_not_liger(model: Any) -> str | None:
    """What the kernel doesn't know about this model; None if it knows everything."""
    causal = causal_model(model)
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output layer is a {type(head).__name__}"
    text = causal.config.get_text_config()
    changed = [key for key in AFTER_THE_PROJECTION if getattr(text, key, None) not in (None, 1.0)]
    return f"its logits are changed after the projection ({', '.join(changed)})" if changed else None


def fused_logprobs(model: Any, states_EW: Tensor, target_E: Tensor, temperature_E: Tensor | None) -> Tensor:
    """log_softmax(logits / temperature)[target] of every edge, from what the last layer gave."""
    head = causal_model(model).get_output_embeddings()
    if temperature_E is not None:  # without a bias, dividing before the projection is dividing after it
        if head.bias is not None:
            raise ValueError("its output layer has a bias, which no temperature may divide")
        states_EW = states_EW / temperature_E[:, None].to(states_EW.dtype)
    loss_E: Tensor = _function()(states_EW.contiguous(), head.weight, target_E, bias=head.bias, reduction="none")
    return -loss_E


def _function() -> Any:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise MissingDependencyError(
            f"{KEY}: liger needs liger-kernel ({error}): {install_command('liger')}"
        ) from error
    return liger_fused_linear_cross_entropy


class EdgeLogprobs(NamedTuple):
    """Logprob and entropy of every edge of a pack, in the order of `pack.edges`."""

    logprob_E: Tensor
    entropy_E: Tensor | None


class Entropy(Enum):
    """Whether to compute the entropy at each edge; its gradient takes as much memory as the logits."""

    NO = 0
    VALUE = 1
    GRADIENT = 2


MOST_VARIANTS = 32
"""How many variants of a function PyTorch compiles before it leaves the function as it is: with and without gradients,
one row or several, adapters on or off, trained or frozen weights. Its own limit is 8."""

CHECKPOINTING = "forward_with_checkpointing"
"""The function that transformers puts around a layer's own code."""


def layers_to_compile(model: Any) -> list[Any]:
    """The model's layers, as transformers marks them."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def compiled_layers(model: Any) -> Iterator[None]:
    """Inside it (forward *and* backward), the layers run compiled; afterwards they are what they were."""
    attention_left_whole()
    with ExitStack() as stack, torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):
        for layer in layers_to_compile(model):
            stack.enter_context(replaced(layer, partial(_run, layer)))
        yield


def _run(layer: Any, *inputs: Any, **options: Any) -> Any:
    """A layer's forward. Newer versions of transformers checkpoint in there, older ones around it."""
    kind: Any = type(layer)
    own, checkpoints = _compiled(kind)
    call = partial(own, layer, **options)
    if checkpoints and layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(call, *inputs)
    return call(*inputs)


@cache
def _compiled(kind: Any) -> tuple[Any, bool]:
    """The layer's own code compiled, and whether a function that checkpoints was around it."""
    forward, checkpoints = kind.forward, False
    while forward.__code__.co_name == CHECKPOINTING:
        forward, checkpoints = forward.__wrapped__, True
    return torch.compile(forward, dynamic=True), checkpoints


@dataclass(frozen=True, slots=True)
class RowForward:
    """Padded batches of ordinary rows with the model's own attention, for packs without sharing. Use it inside
    `session()`, backward pass included."""

    budget: int = 16384
    """Tokens of a padded batch."""
    chunk: int | None = None
    """Most positions whose logits exist at a time. None: depends on the vocabulary. 0: no limit."""
    liger: bool = False
    """Whether Liger's kernel computes the logprobs, without entropy."""
    compiled: bool = False
    """Whether the model's layers run compiled."""

    @contextmanager
    def session(self, model: Any) -> Iterator[None]:
        """Prepare the model."""
        with compiled_layers(model) if self.compiled else nullcontext():
            yield

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        device = _device(model)
        rows = pack.rows
        row_starts = np.array([start for start, _ in rows])
        edge_row = np.searchsorted(row_starts, pack.edges.position, side="right") - 1
        parts, order = [], []
        alone = length_dependent_rope(model) is not None  # together, rows would change each other's positions
        for batch in row_batches(pack, 1 if alone else self.budget):
            if alone:
                forget_lengths(model)
            edges = np.flatnonzero(np.isin(edge_row, batch))
            line = {row: index for index, row in enumerate(batch)}
            lines = np.array([line[int(row)] for row in edge_row[edges]])
            columns = pack.edges.position[edges] - row_starts[edge_row[edges]]
            here = [rows[row] for row in batch]
            arguments = {"input_ids": torch.from_numpy(_padded(pack.ids, here)).to(device), "use_cache": False}
            if pack.experts is not None:
                arguments[ROUTES] = torch.from_numpy(_padded(pack.experts, here)).to(device).long()
            wanted = Wanted(columns, pack.edges.target[edges], pack.edges.temperature[edges], lines)
            positions = len(batch) * len(np.unique(columns))
            parts.append(self._run(model, arguments, wanted, entropy, positions))
            order.append(edges)
        back = torch.from_numpy(np.argsort(np.concatenate(order), kind="stable")).to(device)
        logprob_E = torch.cat([part.logprob_E for part in parts])[back]
        entropies = [part.entropy_E for part in parts if part.entropy_E is not None]
        return EdgeLogprobs(logprob_E, torch.cat(entropies)[back] if entropies else None)

    def _run(
        self, model: Any, arguments: dict[str, Any], wanted: Wanted, entropy: Entropy, positions: int
    ) -> EdgeLogprobs:
        """`positions`: how many would get their logits if all did at once."""
        if self.liger:
            return run_fused(model, arguments, wanted)
        return run_edges(model, arguments, wanted, entropy, chunk_of(model, positions, self.chunk))


@dataclass(frozen=True, slots=True)
class PackForward(RowForward):
    """Trees as one sequence, packs without sharing as rows."""

    @contextmanager
    def session(self, model: Any) -> Iterator[None]:
        with tree_attention(model), RowForward.session(self, model):
            yield

    def __call__(self, model: Any, pack: Pack, *, entropy: Entropy = Entropy.NO) -> EdgeLogprobs:
        if pack.layout is not Layout.TREE:
            return RowForward.__call__(self, model, pack, entropy=entropy)
        arguments = pack_arguments(pack, plan_attention(pack, _device(model)))
        if pack.experts is not None:
            arguments[ROUTES] = torch.from_numpy(pack.experts).to(_device(model))[None].long()
        edges = pack.edges
        return self._run(model, arguments, Wanted(edges.position, edges.target, edges.temperature), entropy, len(edges))


SPREAD = 1.2
"""A batch's longest row is at most this many times as long as its shortest, to limit padding."""

SHORT = 32
"""Rows up to this length share batches whatever their lengths: another batch would cost more than the padding."""


def row_batches(pack: Pack, budget: int) -> list[list[int]]:
    """Indices in `pack.rows`, batched by length: each batch is within the budget of padded tokens, or a single row."""
    lengths = [end - start for start, end in pack.rows]
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        length = lengths[row]
        fits = (
            batches
            and (len(batches[-1]) + 1) * length <= budget
            and length <= max(SPREAD * lengths[batches[-1][0]], SHORT)
        )
        if fits:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def padded_tokens(pack: Pack, budget: int) -> int:
    """Tokens to compute, padding included."""
    lengths = [end - start for start, end in pack.rows]
    return sum(len(batch) * max(lengths[row] for row in batch) for batch in row_batches(pack, budget))


def _padded(values: np.ndarray, rows: list[tuple[int, int]]) -> np.ndarray:
    """A right-padded batch of what the tokens have. Causal models never see the padding."""
    longest = max(end - start for start, end in rows)
    padded = np.zeros((len(rows), longest, *values.shape[1:]), values.dtype)
    for line, (start, end) in enumerate(rows):
        padded[line, : end - start] = values[start:end]
    return padded


def chunk_of(model: Any, positions: int, asked: int | None) -> int | None:
    """How many positions get their logits at a time; None if those of all may exist together."""
    size = chunk_positions(causal_model(model).config.get_text_config().vocab_size) if asked is None else asked
    return size if 0 < size < positions else None


class Wanted(NamedTuple):
    """The tokens whose logprobs are wanted, E of them."""

    position: Indices
    """Where in its row each is predicted."""
    target: Indices
    temperature: Floats
    line: Indices | None = None
    """The row of each. None: there is one row."""


def run_edges(
    model: Any, arguments: dict[str, Any], wanted: Wanted, entropy: Entropy, chunk: int | None
) -> EdgeLogprobs:
    """Run the model, up to what its edges need."""
    device = arguments["input_ids"].device
    targets = _Targets.of(wanted, entropy, device)
    hidden = HiddenStates.of(model, arguments) if chunk is not None else None
    if hidden is not None and chunk is not None:
        found = targets.take_in_chunks(hidden, _states(hidden, wanted), chunk)
    else:
        places, place_E = np.unique(wanted.position, return_inverse=True)
        keep = torch.from_numpy(places).to(device)
        logits_BPV = model(**arguments, logits_to_keep=keep).logits
        if logits_BPV.shape[1] != len(places):  # the model swallows what it doesn't know, and gives all of them
            logits_BPV = logits_BPV[:, keep]
        found = targets.take(_at_places(logits_BPV, wanted.line, place_E), 0)
    return EdgeLogprobs(found[0], found[1] if len(found) > 1 else None)


def run_fused(model: Any, arguments: dict[str, Any], wanted: Wanted) -> EdgeLogprobs:
    """The same by Liger's kernel, without entropy."""
    hidden = HiddenStates.of(model, arguments)
    if hidden is None:
        raise ValueError("the model can't be divided before its output layer")
    targets = _Targets.of(wanted, Entropy.NO, arguments["input_ids"].device)
    return EdgeLogprobs(fused_logprobs(model, _states(hidden, wanted), targets.target_E, targets.temperature_E), None)


def _states(hidden: HiddenStates, wanted: Wanted) -> Tensor:
    """[E, W] of every edge's position."""
    device = hidden.states_BNW.device
    line: Tensor | int = 0 if wanted.line is None else torch.from_numpy(wanted.line).to(device)
    return hidden.states_BNW[line, torch.from_numpy(wanted.position).to(device)]


def _at_places(logits_BPV: Tensor, line_E: Indices | None, place_E: Indices) -> Tensor:
    """[E, V], without a copy where every position has one edge, in order."""
    device = logits_BPV.device
    if line_E is not None:
        return logits_BPV[torch.from_numpy(line_E).to(device), torch.from_numpy(place_E).to(device)]
    if np.array_equal(place_E, np.arange(logits_BPV.shape[1])):
        return logits_BPV[0]
    return logits_BPV[0][torch.from_numpy(place_E).to(device)]


@dataclass(frozen=True, slots=True)
class _Targets:
    """What is asked of each edge's logits."""

    target_E: Tensor
    temperature_E: Tensor | None
    entropy: Entropy

    @classmethod
    def of(cls, wanted: Wanted, entropy: Entropy, device: torch.device) -> _Targets:
        warm = (wanted.temperature != 1.0).any()
        temperature_E = torch.from_numpy(wanted.temperature).to(device) if warm else None
        return cls(torch.from_numpy(wanted.target).to(device), temperature_E, entropy)

    def take(self, logits_EV: Tensor, start: int) -> tuple[Tensor, ...]:
        """log_softmax(logits / T)[target] of the edges from `start` on, and the entropy there if it is asked for."""
        here = slice(start, start + len(logits_EV))
        logits_EV = logits_EV if logits_EV.dtype is torch.float64 else logits_EV.float()
        if self.temperature_E is not None:
            logits_EV = logits_EV / self.temperature_E[here, None].to(logits_EV.dtype)
        log_EV = torch.log_softmax(logits_EV, dim=-1)
        logprob_E = log_EV.gather(1, self.target_E[here, None])[:, 0]
        if self.entropy is Entropy.NO:
            return (logprob_E,)
        if self.entropy is Entropy.VALUE:
            log_EV = log_EV.detach()
        return logprob_E, -(log_EV.exp() * log_EV).sum(dim=-1)

    def take_in_chunks(self, hidden: HiddenStates, states_EW: Tensor, size: int) -> tuple[Tensor, ...]:
        """The same of all edges, from at most `size` at a time. The backward pass computes the logits again instead of
        keeping them."""

        def part(states: Tensor, start: int) -> tuple[Tensor, ...]:
            return self.take(hidden.logits(states), start)

        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, len(states_EW), size):
            states = states_EW[start : start + size]
            if torch.is_grad_enabled():
                parts.append(checkpoint(part, states, start, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(part(states, start))
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device
