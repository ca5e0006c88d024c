"""`Growth`: the call tree while it grows. Context runs merge by token id; a sampled run belongs to its call.

A run ends where prompts diverge and where a prompt ends, so the shape depends on the set of calls, not on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ajet.schema.call_tree import ROOT, Call, CallTree, IntArray, Run
from ajet.schema.chat import Tool


@dataclass(slots=True, eq=False)
class Node:
    """A run that may still be split. A split node keeps its end, so a reference to a node is a reference to its end."""

    ids: IntArray
    parent: Node | None
    start: int
    call: int = ROOT
    contexts: dict[int, Node] = field(default_factory=dict)
    """Context runs that follow this one, by first token."""
    sampled: list[Node] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class Growth:
    """Grows the runs of one episode."""

    def __init__(self) -> None:
        self.root = Node(np.zeros(0, np.int32), None, 0)

    def add_context(self, parent: Node, ids: Sequence[int]) -> tuple[Node, int]:
        """Insert context after a run. Return the run where it ends, and how many of its tokens were already there."""
        rest = np.asarray(ids, np.int32)
        node, shared = parent, 0
        while len(rest):
            child = node.contexts.get(int(rest[0]))
            if child is None:
                child = Node(rest, node, node.end)
                node.contexts[int(rest[0])] = child
                return child, shared
            common = _common_prefix(child.ids, rest)
            shared += common
            node = child if common == len(child.ids) else _split(child, common)
            rest = rest[common:]
        return node, shared

    def add_sampled(self, parent: Node, ids: Sequence[int], call: int) -> Node:
        """Insert the reply of a call."""
        node = Node(np.asarray(ids, np.int32), parent, parent.end, call)
        parent.sampled.append(node)
        return node

    @staticmethod
    def path_ids(node: Node) -> list[int]:
        """All ids from the root to the end of a run."""
        parts = []
        current: Node | None = node
        while current is not None:
            parts.append(current.ids)
            current = current.parent
        ids: list[int] = np.concatenate(parts[::-1]).tolist()
        return ids

    def export(self, calls: Sequence[tuple[Call, Node, Node | None]], toolsets: list[list[Tool]]) -> CallTree:
        """The tree as plain data, with runs in depth-first order. `calls`: with the runs of prompt and reply."""
        runs: list[Run] = []
        index: dict[int, int] = {}
        stack = [child for child in self._children(self.root)[::-1]]
        while stack:
            node = stack.pop()
            parent = ROOT if node.parent is None or node.parent is self.root else index[id(node.parent)]
            index[id(node)] = len(runs)
            runs.append(Run(node.ids, parent, node.start, node.call))
            stack += self._children(node)[::-1]
        for call, prompt, reply in calls:
            call.prompt_run = index.get(id(prompt), ROOT)
            call.prompt_tokens = prompt.end
            call.run = ROOT if reply is None else index[id(reply)]
        return CallTree(runs, [call for call, _, _ in calls], toolsets)

    @staticmethod
    def _children(node: Node) -> list[Node]:
        contexts = [node.contexts[token] for token in sorted(node.contexts)]
        return contexts + sorted(node.sampled, key=lambda child: child.call)


def _common_prefix(first: IntArray, second: IntArray) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


def _split(node: Node, at: int) -> Node:
    """Cut a context run in two; the node keeps the second part."""
    assert node.parent is not None and 0 < at < len(node.ids)
    upper = Node(node.ids[:at], node.parent, node.start)
    node.parent.contexts[int(upper.ids[0])] = upper
    upper.contexts[int(node.ids[at])] = node
    node.ids, node.start, node.parent = node.ids[at:], node.start + at, upper
    return upper
