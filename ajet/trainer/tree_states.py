"""Trees through layers that keep a state from token to token: the state at a fork is computed once, and each branch
goes on from it.

A pack is cut into segments, where it forks. A segment that others go on from is computed by itself, so that its end is
its last token; all that end in leaves run as one padded batch, each on the state of the segment before it. Gradients go
back through the states.

Shapes: N tokens of a pack, B segments of a call, W width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ajet.engine.attention_rules import REFUSALS
from ajet.engine.torch import LayerCache, LayerState, Mixer, mixers_of, replaced
from ajet.trainer.pack import Indices

ROOT = -1
BRANCHING = "GatedDeltaNet"
"""How transformers' names of layers end whose formula for many tokens takes a state to begin with."""


class PackSegment(NamedTuple):
    """Tokens of a pack in which nothing forks."""

    start: int
    end: int
    before: int
    """The segment that it goes on from; ROOT if none."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


def segments_of(ends_N: Indices) -> list[PackSegment]:
    """Of a pack by the ends of its subtrees; a segment comes after the one that it goes on from."""
    cuts = [0, *(np.flatnonzero(np.diff(ends_N)) + 1).tolist(), len(ends_N)]
    found: list[PackSegment] = []
    for start, end in pairwise(cuts):
        above = np.flatnonzero(ends_N[:start] > start)
        before = ROOT if not len(above) else int(np.searchsorted(cuts, above[-1], side="right")) - 1
        found.append(PackSegment(start, end, before))
    return found


def calls_of(segments: Sequence[PackSegment]) -> list[list[int]]:
    """Which segments are computed together, in this order."""
    forks = {segment.before for segment in segments}
    alone = [[index] for index in range(len(segments)) if index in forks]
    leaves = [index for index in range(len(segments)) if index not in forks]
    together = [[index for index in leaves if (segments[index].before == ROOT) is first] for first in (True, False)]
    return [*alone, *(call for call in together if call)]


class BranchCache(LayerCache):
    """The states of one layer, at the beginning of some segments."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # else a single token's state would be changed in place


def can_branch(model: Any) -> bool:
    """Whether all layers that keep a state can go on from that of a fork."""
    if not any(_branches(module) for module in model.modules()):
        return False
    try:
        return all(_branches(mixer.module) for mixer in mixers_of(model))
    except REFUSALS:  # it can't even be asked
        return False


def _branches(module: Any) -> bool:
    return type(module).__name__.endswith(BRANCHING)


@contextmanager
def branching(model: Any) -> Iterator[None]:
    """Inside (forward *and* backward), layers that can branch compute packs that fork."""
    mixers = mixers_of(model) if any(_branches(module) for module in model.modules()) else []
    with ExitStack() as stack:
        for mixer in mixers:
            stack.enter_context(replaced(mixer.module, partial(_mix, mixer.module.forward, mixer)))
        yield


def _mix(own: Any, mixer: Mixer, *inputs: Any, ajet_plan: Any = None, **options: Any) -> Tensor:
    hidden_1NW: Tensor = options["hidden_states"] if "hidden_states" in options else inputs[0]
    if ajet_plan is None:
        output: Tensor = own(*inputs, **options)
        return output
    segments: list[PackSegment] = ajet_plan.segments
    made: dict[int, Tensor] = {}
    states: dict[int, Any] = {}
    for call in calls_of(segments):
        here = [segments[index] for index in call]
        given = [states[segment.before] for segment in here if segment.before != ROOT]
        cache = BranchCache(LayerState.together(given) if given else None)
        rows = [hidden_1NW[0, segment.start : segment.end] for segment in here]
        hidden_BNW = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        output_BNW = own(hidden_BNW, **{mixer.cache: cache})
        for line, (index, segment) in enumerate(zip(call, here, strict=True)):
            made[index] = output_BNW[line, : segment.tokens]
        if len(call) == 1:
            states[call[0]] = cache.state
    return torch.cat([made[index] for index in range(len(segments))])[None]
