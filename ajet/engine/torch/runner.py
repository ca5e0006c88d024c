"""`Runner`: one forward pass over the new tokens of many sequences; returns the logits that replies are drawn from.

When it is made, it checks whether the model can be served: the model must compute attention through transformers'
interface, with keys of the same shape in all layers that attend, and keep the states of the others in transformers'
cache; and the engine must give the logits of the model's own forward pass, beyond every window that a layer has.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ajet.engine.attention_rules import REFUSALS, LayerShape, describe_refusal, layer_shapes, length_dependent_rope
from ajet.engine.layers import carries_state, stated_kinds
from ajet.engine.routing import noting, routers_of
from ajet.engine.torch.attention import StepLayout, serving
from ajet.engine.torch.kv_cache import KVPool, KVShape
from ajet.engine.torch.readers import PassPart
from ajet.engine.torch.states import Mixer, StepStates, goes_on, mixers_of, mixing
from ajet.schema.chat import Sampling
from ajet.schema.errors import EngineError, FeatureUnavailableError

PROBE_TOKENS = 24
"""Tokens of the comparison, beyond the longest window."""
COMPARED = 4
"""The last tokens of the comparison, whose logits are compared."""
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""How far the engine's logits may be from the model's own: room for rounding, not for a wrong position or mask."""


@dataclass(frozen=True, slots=True)
class Work:
    """The new tokens of one sequence in this step, and whether a token is drawn after the last of them."""

    part: PassPart
    tokens: list[int]
    draws: bool


class Runner:
    """Runs a model over the tokens of many sequences at once."""

    def __init__(self, model: PreTrainedModel, longest: int | None = None, *, notes_experts: bool = False) -> None:
        """`longest`: tokens that a conversation may have; windows beyond are not tried. `notes_experts`: leave with
        each sequence which experts its tokens went to."""
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        parameters = inspect.signature(model.forward).parameters
        self._picks_logits = "logits_to_keep" in parameters
        config: Any = model.config.get_text_config()
        self.vocabulary = int(config.vocab_size)

        self._routers = routers_of(model) if notes_experts else []
        self._chosen: list[torch.Tensor] = []
        """By each router in the last pass."""
        shape = ServedShape.of(model)
        self.kv_shape = shape.kv
        self.mixers = [mixer if goes_on(mixer, model) else mixer._replace(by_token=True) for mixer in shape.mixers]
        self.visibility = [layer.rule.visibility for layer in shape.layers]
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
        logits = self.logits(tokens + padding, positions + padding, layout, picks)[:drawing]
        if self._routers:
            self._leave_experts([*rows, *chunks])
        return logits

    def _leave_experts(self, work: list[Work]) -> None:
        """Give each sequence the experts of its new tokens, which are in the pass in this order."""
        chosen_TLK = torch.stack(self._chosen, dim=1).to("cpu", torch.int16).numpy()
        start = 0
        for item in work:
            item.part.kv.take_experts(item.part.context, chosen_TLK[start : start + len(item.tokens)])
            start += len(item.tokens)

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
        states = StepStates(layout.members, apart=layout.apart)
        with serving(self.model), mixing(self.mixers, states), noting(self._routers) as self._chosen:
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


class ServedShape(NamedTuple):
    """What the engine has to store of a model, which may be on PyTorch's `meta` device."""

    layers: list[LayerShape]
    """Those that attend, in the order they run."""
    mixers: list[Mixer]
    """Those that keep a state."""
    kv: KVShape

    @classmethod
    def of(cls, model: PreTrainedModel) -> ServedShape:
        """Raises a `FeatureUnavailableError` that says why the model can't be served."""
        if (kind := length_dependent_rope(model)) is not None:
            raise _unservable(model, f"its rotary embedding ({kind}) depends on the length of a batch")
        try:
            layers, mixers = layer_shapes(model), mixers_of(model)
        except REFUSALS as error:
            raise _unservable(model, describe_refusal(model, error)) from error
        if (kinds := _kept_elsewhere(model, [mixer.layer for mixer in mixers])) is not None:
            raise _unservable(model, f"its layers of type {kinds} keep their state outside transformers' cache")
        if mixers and not layers:
            raise _unservable(model, "none of its layers attends")
        if not layers or not (mixers or [layer.layer for layer in layers] == list(range(len(layers)))):
            why = "not every layer computes its attention through transformers' attention interface"
            raise _unservable(model, why)
        shapes = {(layer.key_heads, layer.key_size, layer.value_size) for layer in layers}
        if len(shapes) != 1:
            raise _unservable(model, "its layers have keys of different shapes")
        return cls(layers, mixers, KVShape(len(layers), *shapes.pop(), sum(mixer.state_bytes for mixer in mixers)))


def _kept_elsewhere(model: PreTrainedModel, mixers: list[int]) -> str | None:
    """The types of layers that should have a state, and showed none."""
    missing = {kind for layer, kind in enumerate(stated_kinds(model)) if layer not in mixers and carries_state(kind)}
    return ", ".join(sorted(missing)) or None


def _check_against_own_forward(runner: Runner, length: int) -> None:
    """A sequence computed beside another, in chunks and rows, must give the logits of the model's own forward pass."""
    model, device = runner.model, runner.device
    tokens = [(7 * index + 3) % runner.vocabulary for index in range(length)]
    keep: dict[str, Any] = {"logits_to_keep": COMPARED} if runner._picks_logits else {}
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([tokens], device=device), use_cache=False, **keep).logits[0, -COMPARED:]
    states = runner.kv_shape.state_tokens(runner.dtype)
    pool = KVPool(runner.kv_shape, runner.dtype, device, 4 * (length + states) + 1024)
    first, second = pool.allocate(length, 2 * length), pool.allocate(length, 2 * length)
    assert first is not None and second is not None
    other = tokens[::-1]
    ours = []
    done = 0
    for count in (length - COMPARED - 3, 4, 1, 1, 1):  # a long chunk, a short one, and rows
        mine = Work(PassPart(first, done, count), tokens[done : done + count], True)
        its = Work(PassPart(second, done, count), other[done : done + count], False)
        both = [its, mine]
        ours.append(runner.forward(both, []) if count == 1 else runner.forward([], both))
        done += count
    if own.isnan().any():
        raise EngineError(f"the logits of {model.config.name_or_path} are NaN: its weights are broken")
    difference = float((own.float() - torch.cat(ours[1:])).abs().max())
    if not difference <= PROBE_TOLERANCE.get(runner.dtype, 1e-3):
        raise _unservable(model, f"its logits differ from those of its own forward pass by {difference:.3g}")


class Draw(NamedTuple):
    """One drawn token; `logprob` is NaN if the model's logits are."""

    token: int
    logprob: float
    top: list[tuple[int, float]] | None


@dataclass(slots=True)
class DrawState:
    """One request's parameters, its random numbers, and what it has drawn."""

    sampling: Sampling
    prompt: list[int]
    top_logprobs: int
    stream: random.Random
    drawn: list[int] = field(default_factory=list)
    greedy: bool = field(init=False)
    temperature: float = field(init=False)
    penalised: bool = field(init=False)
    truncated: bool = field(init=False)

    def __post_init__(self) -> None:
        """What every token asks for, and no token changes."""
        sampling = self.sampling
        self.greedy, self.temperature = sampling.greedy, sampling.logprob_temperature
        self.penalised = bool(
            sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        )
        self.truncated = not self.greedy and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)


def draw_tokens(logits_RV: torch.Tensor, states: list[DrawState]) -> list[Draw]:
    """Draw one token for each row."""
    device = logits_RV.device
    temperatures = [state.temperature for state in states]
    scaled_RV = logits_RV
    if any(temperature != 1.0 for temperature in temperatures):
        scaled_RV = logits_RV / torch.tensor(temperatures, device=device)[:, None]
    logprobs_RV = torch.log_softmax(scaled_RV, dim=-1)
    choice_RV = logprobs_RV
    penalised = [row for row, state in enumerate(states) if state.penalised]
    if penalised:
        choice_RV = choice_RV.clone()
        for row in penalised:
            changed = _penalise(logits_RV[row], states[row]) / temperatures[row]
            choice_RV[row] = torch.log_softmax(changed, dim=-1)
    tokens_R = _choose(choice_RV, states)
    chosen_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    tops = _top(logprobs_RV, states)
    return [Draw(*row) for row in zip(tokens_R.tolist(), chosen_R.tolist(), tops, strict=True)]


def _choose(choice_RV: torch.Tensor, states: list[DrawState]) -> torch.Tensor:
    greedy = [state.greedy for state in states]
    best_R = choice_RV.argmax(dim=-1) if any(greedy) else None
    if best_R is not None and all(greedy):
        return best_R
    probabilities_RV = choice_RV.double().exp()
    truncated = [row for row, state in enumerate(states) if state.truncated]
    for row in truncated:
        probabilities_RV[row] = _truncate(probabilities_RV[row], states[row].sampling)
    # Inverse of the distribution function: one random number per token, whatever else is in the batch.
    cumulative_RV = probabilities_RV.cumsum(dim=-1)
    uniform = [0.0 if state.greedy else state.stream.random() for state in states]
    target_R1 = torch.tensor(uniform, dtype=torch.float64, device=choice_RV.device)[:, None] * cumulative_RV[:, -1:]
    drawn_R = torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0].clamp_max(choice_RV.shape[1] - 1)
    if best_R is None:
        return drawn_R
    return torch.where(torch.tensor(greedy, device=choice_RV.device), best_R, drawn_R)


def _truncate(probabilities_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Zero out what top_k, top_p and min_p exclude; the likeliest token always stays."""
    ordered_V, order_V = probabilities_V.sort(descending=True, stable=True)
    if 0 < sampling.top_k < len(ordered_V):
        ordered_V[sampling.top_k :] = 0.0
    if sampling.top_p < 1.0:
        before_V = ordered_V.cumsum(0) - ordered_V
        ordered_V[1:][before_V[1:] >= sampling.top_p * ordered_V.sum()] = 0.0
    if sampling.min_p > 0.0:
        ordered_V[1:][ordered_V[1:] < sampling.min_p * ordered_V[0]] = 0.0
    return torch.zeros_like(probabilities_V).scatter_(0, order_V, ordered_V)


def _penalise(logits_V: torch.Tensor, state: DrawState) -> torch.Tensor:
    """Presence and frequency penalties count drawn tokens; the repetition penalty counts the prompt's too."""
    sampling, device = state.sampling, logits_V.device
    changed_V = logits_V.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*state.prompt, *state.drawn}), device=device)
        values = changed_V[seen]
        penalty = sampling.repetition_penalty
        changed_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if state.drawn and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(state.drawn)
        tokens = torch.tensor(list(counts), device=device)
        times = torch.tensor([float(count) for count in counts.values()], device=device)
        changed_V[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return changed_V


def _top(logprobs_RV: torch.Tensor, states: list[DrawState]) -> list[list[tuple[int, float]] | None]:
    tops: list[list[tuple[int, float]] | None] = [None] * len(states)
    for row, state in enumerate(states):
        if state.top_logprobs:
            best = logprobs_RV[row].topk(min(state.top_logprobs, logprobs_RV.shape[1]))
            tops[row] = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return tops
