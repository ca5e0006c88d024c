"""`CallRecord`: a call while its episode runs; `PreparedCall`: what a session sends; `FinishedCalls`: all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ajet.context_tracker.conversation import Turn
from ajet.context_tracker.growth import Node
from ajet.schema.call_tree import Call, CallTree
from ajet.schema.chat import Message
from ajet.schema.episode import Ledger, Outcome
from ajet.schema.generation import Sampling


class Audit(NamedTuple):
    """What to check an appended conversation against, when it is rendered whole now and then."""

    opening: str
    """The text of the prompt with which it began."""
    messages: int
    """How many it had when it was last rendered whole."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call and where it stands in the trees of messages and of tokens."""

    index: int
    call: Call
    turn: Turn
    """The last message of its request."""
    prompt: Node
    kwargs_key: str
    audit: Audit
    prompt_ids: list[int]
    """Until the reply has come."""
    begun: int
    """When it began and ended, in the order of what the tracker was told."""
    ended: int = 0
    requests_before: int = 0
    """The serial number of the last request that came before the reply."""
    reply: Node | None = None
    reply_turn: Turn | None = None
    ids: tuple[list[int], list[int]] | None = None
    """Prompt and reply, at hand for the next call; None once another call has gone on from here."""
    reasoning: str = ""
    closed: bool = False
    """Whether the reply ended by itself, so that other messages may follow."""

    def held_prompt(self) -> list[int]:
        """The ids of its prompt, if they are at hand; else nothing."""
        return self.ids[0] if self.ids is not None else self.prompt_ids

    @property
    def in_flight(self) -> bool:
        return not self.ended

    @property
    def reply_key(self) -> tuple[bytes, bytes, str]:
        """Tells equal replies apart by what was sampled, whichever came first."""
        assert self.reply is not None
        return self.reply.ids.tobytes(), self.call.logprobs.tobytes(), self.call.agent


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that may now be sent to the engine."""

    call_id: str
    prompt_ids: list[int]
    sampling: Sampling
    """As asked, with max_tokens clipped to the room that is left, and the ids that end a reply."""
    agent: str
    turn: int
    extends: str | None
    """The call that it continues."""
    new_messages: list[Message]


@dataclass(frozen=True, slots=True)
class FinishedCalls:
    """All calls of an episode that has ended, and what they are worth."""

    tree: CallTree
    ledger: Ledger
    reward: float | None = None
    """None: the episode failed, or nobody gave it a reward."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
