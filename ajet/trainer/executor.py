"""Which executor trains this model: chosen once, by comparing on the first batch. What differs is not used, and the log
says why: a slower way is never a wrong one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ajet.trainer.compiled import CompiledForward, layers_to_compile
from ajet.trainer.forward import BestForward, Forward, RowForward
from ajet.trainer.liger import why_not_liger
from ajet.trainer.pack import Item, Layout
from ajet.trainer.planner import rows_for
from ajet.trainer.tree_check import check_same, check_trees, tree_support

log = logging.getLogger("ajet.trainer")


class Chosen(NamedTuple):
    """How packs are run, and in which layouts."""

    forward: Forward
    layouts: tuple[Layout, ...]


def choose(
    model: Any, items: Sequence[Item], budget: int, chunk: int | None, *, liger: bool = False, compiled: bool = False
) -> Chosen:
    """Trees, unless the model can't compute them or its first trees differ from rows; with Liger's kernel and compiled
    layers, if they are asked for and give the same."""
    why = tree_support(model) or check_trees(model, items)
    if why is not None:
        log.warning("training in rows, without sharing between branches: %s", why)
    plain: BestForward | RowForward = RowForward(budget, chunk) if why is not None else BestForward(budget, chunk)
    layout = Layout.FLAT if why is not None else Layout.TREE
    forward: Forward = plain
    if liger:
        fused = replace(plain, liger=True)
        if (why_not := why_not_liger(model) or check_same(model, items, plain, fused, layout)) is None:
            forward = fused
        else:
            log.warning("training without Liger's kernel: %s", why_not)
    if compiled:
        faster = CompiledForward(forward)
        why_not = None if layers_to_compile(model) else f"{type(model).__name__} doesn't mark its layers"
        if (why_not := why_not or check_same(model, items, forward, faster, layout)) is None:
            forward = faster
        else:
            log.warning("training without compiled layers: %s", why_not)
    rows = rows_for(model)
    return Chosen(forward, (Layout.TREE, rows) if why is None else (rows,))
