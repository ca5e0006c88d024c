"""How well `CostModel` predicts an update's seconds, and what a packing chosen by it loses against the best one.

From the timings in `results/tree_training.json`: 14 shapes of trees, three layouts of each. Next to the constants in
`ajet/trainer/executor.py` stand constants fitted to the relative error, each shape predicted by a fit to the others.

    python benchmarks/pack_cost.py          # seconds: it computes no update
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from common import RESULTS, write_result
from numpy.typing import NDArray
from tree_training import SHAPES, items_for, model_on

from ajet.trainer.executor import CostModel
from ajet.trainer.forward import RowForward
from ajet.trainer.pack import Layout, make_packs

BUDGET = RowForward().budget
UNITS = [CostModel(*row) for row in np.eye(4)]
"""The cost is linear in its four constants."""
CHOICES = (Layout.TREE, Layout.MERGED)
"""What the planner chooses between."""
SWEEPS = 2000

Quantities = dict[tuple[str, Layout], NDArray[np.float64]]
Seconds = dict[tuple[str, Layout], float]


def quantities_of(shape: str) -> Quantities:
    """Tokens, pairs, blocks and batches of each layout."""
    items = items_for(SHAPES[shape]())
    return {
        (shape, layout): np.array([unit.estimate(make_packs(items, layout), BUDGET) for unit in UNITS])
        for layout in Layout
    }


def constants(costs: CostModel) -> NDArray[np.float64]:
    return np.array([costs.token, costs.pair, costs.block, costs.batch])


def scaled(own: NDArray[np.float64], quantities: Quantities, seconds: Seconds) -> NDArray[np.float64]:
    """The constants in seconds, by the one factor that the other shapes give."""
    ratios = [np.log(seconds[key] / (own @ found)) for key, found in quantities.items()]
    return own * float(np.exp(np.mean(ratios)))


def fitted(quantities: Quantities, seconds: Seconds) -> NDArray[np.float64]:
    """All four constants by least squares of the relative error, none below zero: one after the other, again and
    again."""
    rows = np.array([found / seconds[key] for key, found in quantities.items()])
    size = rows.max(0)
    products, wanted = (rows / size).T @ (rows / size), (rows / size).sum(0)
    own = np.zeros(len(size))
    for _ in range(SWEEPS):
        for one in range(len(own)):
            own[one] = max(0.0, own[one] + (wanted[one] - products[one] @ own) / products[one, one])
    return own / size


Fit = Callable[[Quantities, Seconds], NDArray[np.float64]]


def judge(fit: Fit, quantities: Quantities, seconds: Seconds) -> dict[str, Any]:
    """Each shape by a fit to the others: the error of the layouts that are chosen between, and the choice's loss."""
    errors: list[float] = []
    losses: dict[str, float] = {}
    for shape in dict.fromkeys(shape for shape, _ in quantities):
        others = {key: found for key, found in quantities.items() if key[0] != shape and key[1] in CHOICES}
        own = fit(others, seconds)
        predicted = {layout: float(own @ quantities[shape, layout]) for layout in CHOICES}
        errors += [abs(np.log(predicted[layout] / seconds[shape, layout])) for layout in CHOICES]
        chosen = min(CHOICES, key=lambda layout: predicted[layout])
        losses[shape] = seconds[shape, chosen] / min(seconds[shape, layout] for layout in CHOICES) - 1
    return {
        "error": {"median": round(float(np.median(errors)), 3), "largest": round(float(max(errors)), 3)},
        "loss": {"mean": round(float(np.mean(list(losses.values()))), 4), "largest": round(max(losses.values()), 4)},
        "chosen_worse": {shape: round(loss, 4) for shape, loss in losses.items() if loss},
    }


def main() -> None:
    timings = json.loads((RESULTS / "tree_training.json").read_text())
    rows = timings["figures"]["shapes"]
    seconds = {(row["shape"], layout): row["seconds"][layout.value] for row in rows for layout in Layout}
    quantities = {key: found for row in rows for key, found in quantities_of(row["shape"]).items()}
    own = constants(CostModel.of(model_on("cpu")))
    # where merged and flat rows are the same pack, it was timed twice: no prediction can be better than that
    same = [shape for shape, layout in quantities if layout is Layout.FLAT and _alike(quantities, shape)]
    noise = [abs(np.log(seconds[shape, Layout.MERGED] / seconds[shape, Layout.FLAT])) for shape in same]
    figures = {
        "timed": {"date": timings["date"], "machine": timings["machine"]},
        "the same pack twice": {"median": round(float(np.median(noise)), 3), "largest": round(float(max(noise)), 3)},
        "constants": judge(lambda found, known: scaled(own, found, known), quantities, seconds),
        "fitted": judge(fitted, quantities, seconds),
    }
    print(json.dumps(figures, indent=1))
    write_result("pack_cost", figures)


def _alike(quantities: Quantities, shape: str) -> bool:
    return bool((quantities[shape, Layout.FLAT] == quantities[shape, Layout.MERGED]).all())


if __name__ == "__main__":
    main()
