"""Recorded conversations as episodes to imitate: assistant messages are replayed through a `ContextTracker`.

In: messages in OpenAI's format (a JSONL file, or code), or a run's `episodes.sqlite`. Out: episodes whose trees hold
exactly the tokens the model would have had to sample. Replayed ones have reward 1.0, and logprobs of 0: nobody sampled
them. `demonstration_batches` makes a stream of them for `policy_loss: sft`.

What a reply trains is what the model would have to sample: answer and thought are rendered apart, joined as the prompt
needs, ended as the template ends them, and read back with the family's parser. What does not come back is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings
from ajet.context_tracker.encoder import MARK
from ajet.context_tracker.messages import plain_message, plain_messages, split_reasoning
from ajet.context_tracker.template import TemplateRefusal, stub_call, stub_word
from ajet.gateway.chat import ReplyParser, pick_parser
from ajet.gateway.openai_completions import read_tools
from ajet.observe.episode_codec import token_bytes_of
from ajet.observe.episode_store import EpisodeFilter, EpisodeStore
from ajet.schema.chat import DEFAULT_AGENT, DEFAULT_TARGET, Completion, Message, Sampling, Tool
from ajet.schema.episode import Episode, EpisodeStatus
from ajet.schema.errors import ConfigError, InvalidRequestError, TaskDataError
from ajet.schema.task import Task
from ajet.schema.user_code import find_named, looked_in
from ajet.task_reader.task_reader_base import TaskStream

if TYPE_CHECKING:
    from ajet.config import Config


THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The arguments by which the templates of Qwen, GLM, Nemotron, DeepSeek and others are asked for a thought."""


def reply_ids(
    renderer: Renderer,
    parser: ReplyParser,
    history: Sequence[Message],
    reply: Message,
    tools: Sequence[Tool] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids after the prompt of `history`, including the end token. Raises ValueError if no reply reads like this."""
    # a template may change earlier thoughts for a last reply, but a reply doesn't depend on them
    before = [_without_reasoning(message) for message in plain_messages(history)]
    place = _LinePlace(renderer, parser, before, tools, kwargs or {})
    said = plain_message(reply, f"messages[{len(history)}]")
    reasoning, answer = split_reasoning(said)[0].strip("\r\n"), _without_reasoning(said)
    text, end = place.ended(place.after_prompt(answer, reasoning), answer)
    place.check(text, said)
    return renderer.encoder.continuation(text + end)


class _LinePlace:
    """Where a reply is to be written: after this history, with these tools and template arguments."""

    def __init__(
        self,
        renderer: Renderer,
        parser: ReplyParser,
        history: list[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._renderer, self._parser = renderer, parser
        self._history, self._tools, self._kwargs = history, tools, kwargs
        self._open = parser.markup.think_open or "<think>"
        self._close = parser.markup.think_close or "</think>"
        self._mark = rf"{re.escape(self._open)}\s*", rf"{re.escape(self._close)}\s*"
        prompt = self._prompt(kwargs)
        begun = re.search(rf"({self._mark[0]})?({self._mark[1]})?\Z", prompt)
        assert begun is not None
        self._head = prompt[: begun.start()]
        self._begun = begun[0]
        """What the prompt itself has written of the thought."""
        self._thinks = bool(begun[1]) and not begun[2]

    def after_prompt(self, answer: Message, reasoning: str) -> str:
        """What the model writes after the prompt, up to whatever the template puts after a last reply."""
        bare = self._body(answer)
        if self._begun and not self._thinks:
            if reasoning.strip():
                raise ValueError(self._no_place_for_reasoning())
            return self._without_thought(bare)
        if not (reasoning.strip() or self._thinks):
            return bare
        text = self._thought(answer, reasoning, bare)
        if not self._thinks:
            return text
        space = self._begun[len(self._open) :]
        return text.lstrip().removeprefix(self._open).removeprefix(space)

    def ended(self, text: str, answer: Message) -> tuple[str, str]:
        """The text up to its end token, and that. A template may leave it to the next message to end a reply."""
        renderer = self._renderer
        ends = "|".join(map(re.escape, renderer.tokenizer.convert_ids_to_tokens(sorted(renderer.end_ids))))
        if (found := re.search(ends, text)) is not None:
            return text[: found.start()], found[0]
        alone, followed = self._whole(answer), self._whole(answer, *_next_messages(answer))
        token = renderer.encoder.first_control(followed[len(alone) :]) if followed.startswith(alone) else ""
        if not token:
            raise ValueError("the chat template ends this reply without an end token")
        return text, token

    def check(self, text: str, said: Message) -> None:
        """Raise ValueError unless the parser reads this message from the text."""
        called = [{"type": "function", "function": {"name": c["function"]["name"]}} for c in said.get("tool_calls", ())]
        read = self._parser.parse(text.replace(MARK, ""), list(self._tools) or called, in_reasoning=self._thinks)
        for name, expected, found in zip(
            ("tool calls", "reasoning", "content"), _parts(said), _parts(read.message), strict=True
        ):
            if expected != found:
                raise ValueError(
                    f"after this prompt the model can't say this reply's {name}: {_short(expected)} would be read as "
                    f"{_short(found)}" + (f" ({'; '.join(read.malformed)})" if read.malformed else "")
                )

    # ------------------------------------------------------------ rendering

    def _prompt(self, kwargs: Mapping[str, Any]) -> str:
        return self._renderer.text(self._history, self._tools, kwargs)

    def _whole(self, *messages: Message) -> str:
        return self._renderer.text([*self._history, *messages], self._tools, self._kwargs, generate=False)

    def _body(self, reply: Message) -> str:
        """What the template writes for a reply in a history."""
        whole = self._whole(reply)
        if not whole.startswith(self._head):
            raise ValueError("the chat template puts other text before this reply than it prompts the model with")
        return whole[len(self._head) :]

    # ------------------------------------------------------------ the thought

    def _thought(self, answer: Message, reasoning: str, bare: str) -> str:
        """Thought and answer: as the template writes them, if it does, or else joined."""
        marked = re.escape(self._renderer.encoder.mark(reasoning).strip())
        if marked:
            whole = self._body({**answer, "reasoning_content": reasoning})
            if re.match(rf"\s*{self._mark[0]}{marked}\s*{self._mark[1]}", whole):
                return whole
        before, after = self._thought_form()
        return f"{before}{self._renderer.encoder.mark(reasoning).strip()}{after}{self._without_thought(bare)}"

    def _thought_form(self) -> tuple[str, str]:
        """What stands before and after a thought. Some templates keep it only beside tool calls, others never."""
        word = stub_word("reason", 0)
        probe: Message = {"role": "assistant", "content": stub_word("reply", 0), "reasoning_content": word}
        for reply in (probe, {**probe, "tool_calls": stub_call(0)}):
            try:
                body = self._body(reply)
            except TemplateRefusal:
                continue
            if found := re.match(rf"(\s*{self._mark[0]}){word}(\s*{self._mark[1]})", body):
                return found[1], found[2]
        space = self._begun[len(self._open) :]
        return self._open + space, space + self._close + 2 * space

    def _without_thought(self, body: str) -> str:
        return re.sub(rf"\A\s*({self._mark[0]})?{self._mark[1]}", "", body)

    def _no_place_for_reasoning(self) -> str:
        problem = f"the prompt ends with {self._begun.strip()!r}, after which the model does not reason"
        for name in THINKING_SWITCHES:
            if self._prompt({**self._kwargs, name: True}).rstrip().endswith(self._close):
                continue
            switch = json.dumps({"chat_template_kwargs": {name: True}})[1:-1]
            return f"{problem}: add {switch} beside the messages, or drop the reasoning"
        return f"{problem}: drop the reasoning"


def _without_reasoning(message: Message) -> Message:
    """The answer alone. Lines between it and the thought, which recorded texts keep, are the template's to write."""
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    reasoning, content = split_reasoning(message)
    return {**kept, "content": content.lstrip("\r\n") if reasoning else content}


def numbered_calls(messages: Sequence[Message]) -> list[Message]:
    """The same conversation, with the ids that a model gives its calls if it counts them: functions.<name>:<number>."""
    numbered: list[Message] = []
    names: dict[str, str] = {}
    count = 0
    for message in messages:
        if message.get("tool_call_id") in names:
            message = {**message, "tool_call_id": names[message["tool_call_id"]]}
        if calls := message.get("tool_calls"):
            ids = [f"functions.{call['function']['name']}:{count + n}" for n, call in enumerate(calls)]
            names |= {call.get("id", ""): own for call, own in zip(calls, ids, strict=True)}
            count += len(calls)
            message = {**message, "tool_calls": [{**call, "id": own} for call, own in zip(calls, ids, strict=True)]}
        numbered.append(message)
    return numbered


def _next_messages(answer: Message) -> list[Message]:
    """What follows a reply like this in a conversation."""
    calls = answer.get("tool_calls")
    if not calls:
        return [{"role": "user", "content": stub_word("user", 0)}]
    return [{"role": "tool", "content": stub_word("tool", 0), "tool_call_id": call["id"]} for call in calls]


def _parts(message: Message) -> tuple[list[tuple[str, Any]], str, str]:
    """Tool calls, reasoning and content, as far as text can tell them apart."""
    reasoning, content = split_reasoning(message)
    calls = plain_message(message, "reply").get("tool_calls", ())
    called = [(call["function"]["name"], _as_written(call["function"]["arguments"])) for call in calls]
    return called, reasoning.strip(), content.strip()


def _as_written(arguments: Any) -> Any:
    """Arguments between tags have no types: the text of a number is the number."""
    if not isinstance(arguments, dict):
        return arguments
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}


def _short(value: Any) -> str:
    if not value:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= 80 else text[:80] + "…")


_NO_LIMIT = 1 << 30


def read_demonstrations(path: Path, renderer: Renderer) -> list[Episode]:
    """One conversation per line: `{"messages": […], "tools": […], "chat_template_kwargs": {…}}`, the last two if there
    are any. Messages with `"train": false` are context only."""
    episodes = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TaskDataError(f"{path}: {error.strerror or error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
            if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
                raise ValueError('expected {"messages": […]}')
            kwargs = record.get("chat_template_kwargs") or {}
            if not isinstance(kwargs, dict):
                raise ValueError('expected {"chat_template_kwargs": {"name": value}}')
            offered = record.get("tools") or []
            if not isinstance(offered, list):
                raise ValueError('expected {"tools": [{"type": "function", "function": {…}}]}')
            tools = read_tools(offered)  # in the form in which a request's reach the template
            name = f"line-{number}"
            episodes.append(replay(renderer, record["messages"], tools, template_kwargs=kwargs, name=name))
        except (ValueError, KeyError, TypeError, InvalidRequestError) as error:
            raise TaskDataError(f"{path}:{number}: {error}") from error
    if not episodes:
        raise TaskDataError(f"{path} holds no conversation: expected one JSON object with `messages` per line")
    return episodes


def replay(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    name: str = "",
) -> Episode:
    """The episode in which a model wrote these assistant messages."""
    limits = TrackerSettings(max_model_len=_NO_LIMIT, max_steps=_NO_LIMIT, checks=(), detect_forks=False)
    tracker, parser = ContextTracker(renderer, limits), pick_parser(renderer.tokenizer)
    spoken = plain_messages(messages)
    if parser.markup.numbered_ids:
        spoken = numbered_calls(spoken)
    replies = [i for i, one in enumerate(messages) if one["role"] == "assistant" and _is_trained(one, i)]
    if not replies:
        raise ValueError("the conversation holds no assistant message to train")
    if replies[0] == 0:
        raise ValueError('messages[0] answers nothing, so no prompt leads to it: give it "train": false')
    for index in replies:
        before, reply = spoken[:index], spoken[index]
        if messages[index].get("content") is None and reply.keys() == {"role", "content"}:  # perhaps under another name
            raise ValueError(f'messages[{index}] has no content and no tool calls: add them, or "train": false')
        ids = reply_ids(renderer, parser, before, reply, tools, template_kwargs)
        prepared = tracker.begin(
            DEFAULT_AGENT, DEFAULT_TARGET, before, tools, Sampling(), template_kwargs=template_kwargs
        )
        tracker.commit(prepared.call_id, Completion(ids, [0.0] * len(ids), "stop"), reply)
    calls = tracker.finish(1.0)
    return Episode(name, name, EpisodeStatus.COMPLETED, calls.tree, calls.ledger, group_id=name, reward=calls.reward)


def _is_trained(reply: Message, index: int) -> bool:
    """Unless `train` or `weight`, which is what OpenAI's fine-tuning calls it, says no."""
    said = {name: reply[name] for name in ("train", "weight") if reply.get(name) is not None}
    for name, value in said.items():
        if value not in (0, 1):  # false and true, too
            raise ValueError(f'messages[{index}].{name} is {value!r}: expected "train": false, or true')
    return all(said.values())


def demonstration_batches(config: Config, renderer: Renderer) -> TaskStream:
    """Batches of `sft.demonstrations`; each task holds its episode in `metadata["episode"]`."""
    sft = config.ajet.trainer_common.algorithm.sft
    assert sft.demonstrations is not None
    path = _find(sft.demonstrations, config)
    recorded = path.suffix == ".sqlite"
    episodes = list(_recorded(path, sft.min_reward)) if recorded else read_demonstrations(path, renderer)
    if not episodes:
        raise _none_to_imitate(path, sft.min_reward)
    if recorded:
        _check_vocabulary(path, episodes, renderer.tokenizer)
    tasks = [
        Task(task_id=f"{index}-{episode.episode_id}", metadata={"episode": episode})
        for index, episode in enumerate(episodes)
    ]
    reader = config.ajet.task_reader
    return TaskStream(tasks, seed=reader.seed, batch_size=config.ajet.data.train_batch_size, shuffle=reader.shuffle)


def count_demonstrations(config: Config) -> int:
    """How many conversations or episodes there are to imitate, without a tokenizer."""
    sft = config.ajet.trainer_common.algorithm.sft
    assert sft.demonstrations is not None
    path = _find(sft.demonstrations, config)
    if path.suffix == ".sqlite":
        if count := sum(1 for _ in _recorded(path, sft.min_reward)):
            return count
        raise _none_to_imitate(path, sft.min_reward)
    return sum(1 for line in path.read_bytes().split(b"\n") if line.strip())


def _none_to_imitate(path: Path, least: float) -> TaskDataError:
    """A folder of `ajet eval` holds episodes of a validation alone: whoever wants to imitate those has to say so."""
    said = f"{path} holds no training episode with a reward of at least {least:g}"
    if others := sum(1 for _ in _recorded(path, least, validation=True)):
        said += (
            f"; the {others} of a validation, as `ajet eval` records, are left out. To imitate them all the same, name "
            f"what `ajet export episodes {path.parent} FILE.jsonl --format sft --reward-min {least:g}` writes"
        )
    return TaskDataError(said)


def _recorded(path: Path, least: float, *, validation: bool = False) -> Iterator[Episode]:
    """A run's training episodes, or those of its validations, with a reward of at least `least`."""
    with closing(EpisodeStore(path)) as store:
        for record in store.all(EpisodeFilter(validation=validation)):
            episode = record.episode
            if episode.reward is not None and episode.reward >= least and episode.tree.trained_tokens:
                yield episode


def _check_vocabulary(path: Path, episodes: Sequence[Episode], tokenizer: Any) -> None:
    """Refuse ids that another model's tokenizer gave: here they stand for other text."""
    ids = sorted({token for episode in episodes for run in episode.tree.runs for token in run.ids.tolist()})
    with closing(EpisodeStore(path)) as store:
        recorded = store.token_bytes(ids)
    here = token_bytes_of(tokenizer)(recorded)
    for token, was in recorded.items():
        if here[token] != was:
            raise TaskDataError(
                f"{path}: its episodes are of a model with another vocabulary (token {token} is {_text(was)} there and "
                f"{_text(here[token])} in ajet.model.path). To imitate what they say, name what `ajet export episodes "
                f"{path.parent} FILE.jsonl --format sft` writes"
            )


def _text(token: bytes) -> str:
    return repr(token.decode(errors="replace"))


def _find(name: str, config: Config) -> Path:
    for file in (name, f"{name}/episodes.sqlite"):  # of a run, its episodes
        if (found := find_named(file, config.base_dirs, Path.is_file)) is not None:
            return found
    raise ConfigError(
        f"ajet.trainer_common.algorithm.sft.demonstrations: no such file: {name}\n"
        f"    looked in {looked_in(name, config.base_dirs)}"
    )
