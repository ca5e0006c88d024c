"""CPU time and fidelity of the context tracker, compared with rendering and tokenizing the whole history for each call.

Episodes have T turns with about 100 tokens per message, in five shapes: `linear`, `tools` (10 tools), `agents` (three
that take turns), `tree` (a planner that samples two replies and asks a helper in every third step), and `rewriting`
(the memory is cut back every eighth turn). Some replies are not tokenized the way the tokenizer would do it,
as happens when a model samples. Requests arrive as JSON, as they do at the gateway; reading what is new is counted.

The tokenizer is built here and resembles those of today's models (30,000 merges learned from Python's own sources,
Qwen's splitting rule, ChatML with tools); `--model` uses another one. Writes `results/context_tracker.json` and, if
matplotlib is installed, the chart of `docs/benchmarks/speed.md`.

    python benchmarks/context_tracker.py [--model tiny:qwen2] [--turns 5 20 50 100 200] [--repeats 3]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sysconfig
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from common import RESULTS, write_result

from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings, linear_samples
from ajet.engine.model_source import ModelSource
from ajet.observe.episode_codec import encode_episode
from ajet.schema.chat import Completion, FixedTools, JsonMessages, Sampling
from ajet.schema.episode import ROOT, EpisodeStatus
from ajet.schema.episode import Episode as FinishedEpisode

CHART = Path(__file__).parent.parent / "docs" / "assets" / "context_tracker.svg"
TOKENS_A_MESSAGE = 100
DRIFT = 0.3
SAME_WORK = 200
"""Turns measured at a time."""
NAIVE_TURNS = (5, 20, 50, 100)
LONG_TURNS = (125, 250, 500, 1000, 2000)
LONG_TOOLS = 50
OTHER_WORK = [{"role": "user", "content": "a message of somebody else " * 32}] * 2000
"""As large as the longest conversation. Writing its JSON empties the processor's caches."""
TEXT = """the planner opens a map and marks every station where water was found then asks its helper whether the old
bridge still carries wagons before it chooses a road"""
WORDS = TEXT.split()
MERGES = 30_000
SOURCES = 150
"""Files of Python's standard library that the tokenizer learns from."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LIMITS = TrackerSettings(
    max_model_len=10**7, max_prompt_length=10**7, max_response_length=10**7, max_steps=10**6, max_sample_per_task=10**6
)


@dataclass
class Clock:
    """CPU seconds spent inside what is measured."""

    spent: float = 0.0

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gc.disable()  # a pass over the requests that this program made would be counted as the tracker's
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            self.spent += time.process_time() - start
            gc.enable()


@dataclass
class World:
    """Texts, tools and sampled tokens of one episode."""

    tokenizer: Any
    rng: random.Random
    drift: float
    length: int
    """Words of a message that make about `TOKENS_A_MESSAGE` tokens."""
    drifted: int = 0
    replies: int = 0

    def text(self) -> str:
        words = (self.rng.choice(WORDS) for _ in range(self.length))
        return " ".join(word if self.rng.random() > 0.1 else str(self.rng.randint(0, 9999)) for word in words)

    def sampled(self, text: str) -> Completion:
        """What an engine might have drawn to say this."""
        tokenizer, self.replies = self.tokenizer, self.replies + 1
        ids = tokenizer.encode(text, add_special_tokens=False)
        if self.rng.random() < self.drift:
            at = self.rng.choice([i for i, token in enumerate(ids) if len(tokenizer.decode([token])) > 1])
            spelled = [t for c in tokenizer.decode([ids[at]]) for t in tokenizer.encode(c, add_special_tokens=False)]
            assert tokenizer.decode(spelled) == tokenizer.decode([ids[at]])
            ids = [*ids[:at], *spelled, *ids[at + 1 :]]
            self.drifted += 1
        ids = [*ids, tokenizer.eos_token_id]
        return Completion(ids, [-self.rng.random() for _ in ids], "stop", tokenizer.eos_token_id)


@dataclass
class Talk:
    """One agent's conversation."""

    agent: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Seen:
    """What the engine was given and what it gave."""

    prompt: array[int]
    sampled: array[int]


class Episode:
    """Drives a tracker as a session does."""

    def __init__(self, world: World, renderer: Renderer, *, keep: bool = True) -> None:
        """`keep`: what the engine was given is kept for a check."""
        self.world, self.clock, self.keep = world, Clock(), keep
        self.tracker = ContextTracker(renderer, LIMITS)
        self.seen: list[Seen] = []
        self.toolsets: dict[str, FixedTools] = {}
        """As the gateway does, tools that come in the same JSON are read once."""

    def call(self, talk: Talk, reply: dict[str, Any], said: str, *, choice: int = 0) -> dict[str, Any]:
        """One model call; returns the reply as the client will send it back."""
        messages = JsonMessages(json.dumps(talk.messages).encode(), msgspec.json.decode)
        tools = self.toolsets.setdefault(json.dumps(talk.tools), FixedTools(talk.tools))
        begun = self.clock.run(self.tracker.begin, talk.agent, "target", messages, tools, Sampling(), choice=choice)
        completion = self.world.sampled(said)
        self.clock.run(self.tracker.commit, begun.call_id, completion, reply, text=said)
        if self.keep:
            self.seen.append(Seen(array("i", begun.prompt_ids), array("i", completion.token_ids)))
        return reply

    def say(self, talk: Talk, *, keep: bool = True, choice: int = 0) -> None:
        said = self.world.text()
        reply = self.call(talk, {"role": "assistant", "content": said}, said, choice=choice)
        if keep:
            talk.messages.append(reply)

    def use_tool(self, talk: Talk, index: int) -> None:
        arguments = json.dumps({"query": self.world.text()})
        name = talk.tools[index % len(talk.tools)]["function"]["name"]
        call = {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        said = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        reply = {"role": "assistant", "content": None, "tool_calls": [call]}
        talk.messages.append(self.call(talk, reply, said))
        talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.world.text()})

    def ask(self, talk: Talk) -> None:
        talk.messages.append({"role": "user", "content": self.world.text()})


def linear(episode: Episode, turns: int) -> None:
    talk = _talk(episode, "solver")
    for _ in range(turns):
        episode.ask(talk)
        episode.say(talk)


def tools(episode: Episode, turns: int) -> None:
    talk = _talk(episode, "solver", [_tool(index) for index in range(10)])
    episode.ask(talk)
    for index in range(turns - 1):
        episode.use_tool(talk, index)
    episode.say(talk)


def agents(episode: Episode, turns: int) -> None:
    talks = [_talk(episode, name) for name in ("planner", "worker", "critic")]
    for index in range(turns):
        talk = talks[index % 3]
        episode.ask(talk)
        episode.say(talk)


def tree(episode: Episode, turns: int) -> None:
    talk = _talk(episode, "planner")
    for index in range(turns):
        episode.ask(talk)
        if index % 3 == 2:
            episode.say(talk, keep=False)
            helper = _talk(episode, "helper")
            episode.ask(helper)
            episode.say(helper)
        episode.say(talk, choice=int(index % 3 == 2))


def rewriting(episode: Episode, turns: int) -> None:
    talk = _talk(episode, "solver")
    for index in range(turns):
        if index % 8 == 7:
            talk.messages[1:] = [{"role": "user", "content": f"So far: {episode.world.text()}"}]
        else:
            episode.ask(talk)
        episode.say(talk)


SHAPES = {"linear": linear, "tools": tools, "agents": agents, "tree": tree, "rewriting": rewriting}


def _talk(episode: Episode, agent: str, tools: list[dict[str, Any]] | None = None) -> Talk:
    return Talk(agent, [{"role": "system", "content": f"You are the {agent}. {episode.world.text()}"}], tools or [])


def _tool(index: int) -> dict[str, Any]:
    properties = {f"field{n}": {"type": "string", "description": "what to look for and where"} for n in range(3)}
    properties["query"] = {"type": "string", "description": "the words to look for"}
    parameters = {"type": "object", "properties": properties, "required": ["query"]}
    return {
        "type": "function",
        "function": {
            "name": f"tool_{index}",
            "description": f"Look up source number {index}",
            "parameters": parameters,
        },
    }


# ---------------------------------------------------------------- what is measured


def measure(shape: str, turns: int, renderer: Renderer, seed: int, drift: float = DRIFT) -> dict[str, Any]:
    """One episode: its CPU seconds, and whether every call stands in a sample as the engine saw it."""
    # A seed of its own: the encoder remembers pieces of text, and no episode may profit from another's.
    rng = random.Random(f"{shape} {turns} {seed}")
    world = World(renderer.tokenizer, rng, drift, words_for(renderer.tokenizer))
    episode = Episode(world, renderer)
    SHAPES[shape](episode, turns)
    finished = episode.clock.run(episode.tracker.finish, 1.0)
    samples, ledger = episode.clock.run(
        linear_samples, finished.tree, max_prompt_length=10**7, max_response_length=10**7, max_samples=10**6
    )
    recorded = FinishedEpisode("episode", "task", EpisodeStatus.COMPLETED, finished.tree, finished.ledger, reward=1.0)
    masked = sum(ledger.masked.values())
    exact = faithful(finished.tree, samples, episode.seen)
    return {
        "cpu_s": episode.clock.spent,
        "calls": len(episode.seen),
        "samples": len(samples),
        "smallest_number_of_samples": leaves(finished.tree),
        "tokens": finished.tree.tokens,
        "stored_bytes": len(encode_episode(recorded)),
        "tokens_prompted": sum(len(seen.prompt) for seen in episode.seen),
        "trained": ledger.trained,
        "masked": masked,
        "drifted_replies": world.drifted / world.replies,
        "faithful_calls": exact / len(episode.seen),
    }


@dataclass
class ColdClock(Clock):
    """Does other work before each measured piece, so that none finds the processor's caches its own."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        json.dumps(OTHER_WORK).encode()
        return super().run(function, *args, **kwargs)


def long_conversation(turns: int, renderer: Renderer, *, cold: bool) -> float:
    """CPU seconds of one conversation with many tools. Whether its calls are exact, shorter ones say.

    Writing a request's JSON, which isn't measured, cools the caches the more the longer the request is. `cold`: they
    are equally cold for all lengths, so that what grows is the tracker's work.
    """
    # no conversation may profit from another's texts, which the encoder remembers
    world = World(renderer.tokenizer, random.Random(f"{turns} {cold}"), DRIFT, words_for(renderer.tokenizer))
    episode = Episode(world, renderer, keep=False)
    episode.clock = ColdClock() if cold else Clock()
    talk = _talk(episode, "solver", [_tool(index) for index in range(LONG_TOOLS)])
    episode.ask(talk)
    for index in range(turns - 1):
        episode.use_tool(talk, index)
    episode.say(talk)
    episode.clock.run(episode.tracker.finish, 1.0)
    return episode.clock.spent


def steady(shape: str, turns: int, renderer: Renderer, seed: int) -> dict[str, Any]:
    """The mean of as many episodes as make a long one: a short one alone may find the machine's caches all its own."""
    count = max(1, SAME_WORK // turns)
    found = [measure(shape, turns, renderer, 1 + seed * count + index) for index in range(count)]
    faithful_calls = min(figures["faithful_calls"] for figures in found)
    return {**found[0], "cpu_s": statistics.fmean(f["cpu_s"] for f in found), "faithful_calls": faithful_calls}


def faithful(tree: Any, samples: list[Any], seen: list[Seen]) -> int:
    """Calls whose exact prompt and reply stand in a sample, each reply trained once (or masked, if abandoned)."""
    rows = [(s.prompt_ids.tolist() + s.response_ids.tolist(), s) for s in samples]
    exact = 0
    for index, call in enumerate(seen):
        whole = (call.prompt + call.sampled).tolist()
        places = [s for ids, s in rows if ids[: len(whole)] == whole]
        trained = sum(int((s.response_mask & (s.call_of_token == index)).sum()) for _, s in rows)
        wanted = 0 if tree.calls[index].drop else len(call.sampled)
        stored = tree.prompt_ids(index).tolist() + tree.runs[tree.calls[index].run].ids.tolist()
        exact += stored == whole and trained == wanted and (bool(places) or not wanted)
    return exact


def leaves(tree: Any) -> int:
    """Trained runs that no other trained run follows: fewer rows could not hold them."""
    followed = set()
    for call in tree.calls:
        if call.run != ROOT and call.mask.any():
            followed.update(tree.path(tree.runs[call.run].parent))
    return sum(call.run not in followed for call in tree.calls if call.run != ROOT and call.mask.any())


def naive(tokenizer: Any, turns: int, seed: int) -> float:
    """CPU seconds of a tracker that renders and tokenizes the whole conversation four times a call.

    Once to check the length, once for the prompt, once with the reply, once more to compare.
    """
    world = World(tokenizer, random.Random(seed), 0.0, words_for(tokenizer))
    messages: list[dict[str, Any]] = [{"role": "system", "content": world.text()}]
    clock = Clock()

    def ids(generate: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def one_call(reply: dict[str, Any]) -> None:
        ids(True)
        before = ids(False)
        messages.append(reply)
        after = ids(False)
        del after[: len(before)]
        ids(True)

    for _ in range(turns):
        messages.append({"role": "user", "content": world.text()})
        clock.run(one_call, {"role": "assistant", "content": world.text()})
    return clock.spent


def build_tokenizer() -> Any:
    """A tokenizer of ordinary size: with a tiny one, 100 tokens are a third of the text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), by_bytes])
    backend.decoder = decoders.ByteLevel()
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:SOURCES]
    texts = [TEXT, *(path.read_text(errors="ignore") for path in library)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=MERGES, initial_alphabet=alphabet, min_frequency=1, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = ModelSource.resolve("tiny:qwen2").tokenizer().chat_template
    return tokenizer


def words_for(tokenizer: Any) -> int:
    """How many words make about `TOKENS_A_MESSAGE` tokens."""
    probe = World(tokenizer, random.Random(0), 0.0, 1000).text()
    return round(TOKENS_A_MESSAGE * 1000 / len(tokenizer.encode(probe, add_special_tokens=False)))


def exponent(seconds: dict[int, float]) -> float:
    """Slope of log CPU over log turns."""
    points = [(math.log(turns), math.log(spent)) for turns, spent in seconds.items()]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def runs(turns: list[int]) -> Iterator[tuple[str, int]]:
    for shape in SHAPES:
        for count in turns:
            yield shape, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="whose tokenizer and chat template are used (default: one that is built here)")
    parser.add_argument("--turns", type=int, nargs="+", default=[5, 20, 50, 100, 200])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-chart", action="store_true")
    arguments = parser.parse_args()
    tokenizer = ModelSource.resolve(arguments.model).tokenizer() if arguments.model else build_tokenizer()
    renderer = Renderer(tokenizer)
    for shape in SHAPES:  # what is learned once per process is not an episode's cost
        measure(shape, 20, renderer, seed=0)

    episodes: dict[str, dict[int, dict[str, Any]]] = {}
    for shape, turns in runs(arguments.turns):
        repeats = [steady(shape, turns, renderer, seed) for seed in range(arguments.repeats)]
        best = min(repeats, key=lambda figures: figures["cpu_s"])
        best["faithful_calls"] = min(figures["faithful_calls"] for figures in repeats)
        episodes.setdefault(shape, {})[turns] = best
        print(shape, turns, {key: round(value, 4) for key, value in best.items()}, flush=True)
    baseline = {turns: naive(tokenizer, turns, seed=1) for turns in NAIVE_TURNS if turns <= max(arguments.turns)}
    long = {turns: long_conversation(turns, renderer, cold=False) for turns in LONG_TURNS}
    cold = {turns: long_conversation(turns, renderer, cold=True) for turns in LONG_TURNS}
    figures = {
        "model": arguments.model or f"built here: {len(tokenizer)} tokens",
        "episodes": episodes,
        "naive_cpu_s": baseline,
        "times_cheaper_than_naive": {
            t: baseline[t] / episodes["linear"][t]["cpu_s"] for t in baseline if t in episodes["linear"]
        },
        "growth_exponent_20_to_200": {
            shape: exponent({turns: found["cpu_s"] for turns, found in by_turns.items() if turns >= 20})
            for shape, by_turns in episodes.items()
        },
        "with_50_tools_cpu_s": long,
        "with_50_tools_growth_exponent": exponent(long),
        "with_50_tools_cold_cpu_s": cold,
        "with_50_tools_cold_growth_exponent": exponent(cold),
    }
    print("with 50 tools", long, exponent(long), "equally cold", cold, exponent(cold))
    print(
        json.dumps(
            {key: figures[key] for key in ("naive_cpu_s", "times_cheaper_than_naive", "growth_exponent_20_to_200")}
        )
    )
    write_result("context_tracker", figures)
    print("figures in", RESULTS / "context_tracker.json")
    if not arguments.no_chart:
        draw(figures)


def draw(figures: dict[str, Any]) -> None:
    """The chart of the documentation."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no chart: matplotlib is not installed (pip install -e '.[plot]')")
        return
    plt.rcParams["svg.hashsalt"] = "ajet"
    chart, axes = plt.subplots(figsize=(7, 4.2))
    axes.plot(*zip(*figures["naive_cpu_s"].items(), strict=True), "k--o", label="whole history each call (linear)")
    for shape, by_turns in figures["episodes"].items():
        axes.plot(list(by_turns), [found["cpu_s"] for found in by_turns.values()], "-o", label=shape, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="turns in the episode", ylabel="CPU seconds per episode")
    axes.set_xticks(list(figures["episodes"]["linear"]), [str(turns) for turns in figures["episodes"]["linear"]])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    CHART.parent.mkdir(parents=True, exist_ok=True)
    chart.tight_layout()
    chart.savefig(CHART, metadata={"Date": None})
    print("chart in", CHART)


if __name__ == "__main__":
    main()
