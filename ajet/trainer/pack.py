"""Packs the call trees of a batch into sequences in which every token is computed once.

In: call trees with their credit. Out: `Pack`s. A pack is a forest laid out depth-first: context shared by several calls
or episodes is one run of tokens, sampled runs stay apart, position = depth. A pack trains its *edges*, an explicit list
of (predicting position → target token), because one hidden state may predict several children.

In the layout, every node's subtree is contiguous and its longest child follows it directly, so that

- token i sees token j exactly if `j <= i < ends[j]`, where `ends[j]` is the end of the subtree of j's node;
- a chain is a plain causal row; a forest is causal rows plus, where rows branch off, unmasked rectangles (`Blocks`).

The same builder makes the layouts without sharing (`Layout.MERGED`, `Layout.FLAT`): their rows are separate trees.
Only numpy: no model, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ajet.schema.episode import CallTree, IntArray
from ajet.trainer.credit.estimators import EpisodeCredit

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


class Layout(StrEnum):
    """How much is shared."""

    TREE = "tree"
    """Every shared run once, even across episodes."""
    MERGED = "merged"
    """One row per root-to-leaf path; each token is trained in one of the rows that contain it."""
    FLAT = "flat"
    """One row per call: its prompt and its reply."""


@dataclass(slots=True)
class Blocks:
    """Which ranges of a pack attend to which: disjoint causal rows, and unmasked rectangles where rows branch off."""

    causal: list[tuple[int, int]] = field(default_factory=list)
    """(start, end). Every token is in exactly one row."""
    full: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(query start, query end, key start, key end)."""


@dataclass(slots=True)
class Edges:
    """What is trained. Arrays have one element per edge, `entry_*` arrays one per entry of an edge."""

    position: Indices
    """Where in the pack the target is predicted."""
    target: Indices
    temperature: Floats
    sampler_logprob: Floats
    episode: Indices
    call: Indices
    token: Indices
    """Index of the target in its call's reply."""
    trajectory: Indices
    """Number, within the batch, of the (episode, agent) that a sequence-level ratio is taken over."""
    entry_edge: Indices
    entry_advantage: Floats
    entry_weight: Floats

    def __len__(self) -> int:
        return len(self.position)

    def by_call(self) -> list[tuple[tuple[int, int], slice]]:
        """((episode, call), its edges) in order: a call's edges are contiguous, in the order of its reply."""
        starts = np.flatnonzero(np.diff(self.episode, prepend=-1) | np.diff(self.call, prepend=-1))
        keys = zip(self.episode[starts].tolist(), self.call[starts].tolist(), strict=True)
        bounds = [*starts.tolist(), len(self)]
        return [(key, slice(bounds[i], bounds[i + 1])) for i, key in enumerate(keys)]


@dataclass(slots=True)
class Pack:
    """One sequence to compute."""

    layout: Layout
    ids: Indices
    positions: Indices
    ends: Indices
    blocks: Blocks
    edges: Edges
    unshared_tokens: int
    """Tokens that the same edges would take as one flat row per call."""
    experts: NDArray[np.int16] | None = None
    """[N, layers, chosen] to follow; -1 where the model chooses itself."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """The ranges that share nothing with each other: the roots' subtrees. Plain causal rows unless TREE."""
        rows = []
        start = 0
        while start < len(self.ids):
            end = int(self.ends[start])
            rows.append((start, end))
            start = end
        return rows


@dataclass(slots=True)
class Item:
    """One trained call of a batch."""

    tree: CallTree
    episode: int
    call: int
    trajectory: int
    entries: list[tuple[float, float]]

    @property
    def last_trained(self) -> int:
        """Index in the reply of the last trained token."""
        return int(np.flatnonzero(self.tree.calls[self.call].mask)[-1])

    @property
    def row_tokens(self) -> int:
        """Tokens to compute if this call is a separate row."""
        return self.tree.calls[self.call].prompt_tokens + self.last_trained


def items_of(episodes: Iterable[tuple[CallTree, EpisodeCredit]]) -> list[Item]:
    """The trained calls of a batch. Trajectories are numbered by episode and agent."""
    items = []
    trajectories: dict[tuple[int, str], int] = {}
    for index, (tree, credit) in enumerate(episodes):
        for call_index, (call, call_credit) in enumerate(zip(tree.calls, credit.calls, strict=True)):
            if call_credit.entries and call.mask.any():
                trajectory = trajectories.setdefault((index, call.agent), len(trajectories))
                items.append(Item(tree, index, call_index, trajectory, call_credit.entries))
    return items


def make_packs(items: Sequence[Item], layout: Layout = Layout.TREE, budget: int | None = None) -> list[Pack]:
    """Pack the calls, in order, into as few sequences of at most `budget` tokens as that order allows.

    When a pack would grow too long, the next one starts with the ancestors that it needs, as context. Each edge is in
    exactly one pack, so the packs' gradients add up to that of the whole. A call that exceeds the budget by itself gets
    its own pack.
    """
    packs = []
    forest = _Forest(layout)
    roots = _row_keys(items, layout)
    for item, root in zip(items, roots, strict=True):
        if budget is not None and forest.items and forest.tokens + forest.missing(item, root) > budget:
            packs.append(forest.pack())
            forest = _Forest(layout)
        forest.add(item, root)
    if forest.items:
        packs.append(forest.pack())
    return packs


def _row_keys(items: Sequence[Item], layout: Layout) -> list[int]:
    """Items with the same key may share tokens."""
    if layout is Layout.TREE:
        return [0] * len(items)
    if layout is Layout.FLAT:
        return list(range(len(items)))
    index_of = {(item.episode, item.call): index for index, item in enumerate(items)}
    keys = [-1] * len(items)
    for index in range(len(items) - 1, -1, -1):
        if keys[index] != -1:
            continue  # trained in the row of a call that continues it
        item = items[index]
        keys[index] = index
        for run in item.tree.path(item.tree.calls[item.call].prompt_run):
            above = index_of.get((item.episode, item.tree.runs[run].call))
            if above is not None and keys[above] == -1:
                keys[above] = index
    return keys


class _Node:
    """A run of tokens in the forest."""

    __slots__ = ("children", "context", "end", "ids", "needed", "parent", "size", "start", "where")

    def __init__(self, ids: IntArray, parent: _Node | None, start: int) -> None:
        self.ids = ids
        self.parent = parent
        self.start = start  # depth of the first token
        self.children: list[_Node] = []
        self.context: dict[int, _Node] = {}  # by first token: context children, which merge
        self.needed = 0  # leading tokens that some edge of this node's own needs
        self.size = 0  # tokens of the subtree in the layout
        self.where = 0  # index of the first token in the layout
        self.end = 0  # end of the subtree in the layout

    @property
    def length(self) -> int:
        """Tokens in the layout: a leaf's tail that predicts nothing is left out."""
        return len(self.ids) if any(child.size for child in self.children) else self.needed


_RunKey = tuple[int, int, int]


class _Forest:
    """Grows a pack call by call."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.items: list[tuple[Item, _Node, _Node]] = []
        """Each with the node its prompt ends in and the node of its reply."""
        self.tokens = 0
        self.unshared = 0
        self.roots: dict[int, _Node] = {}
        self.known: dict[_RunKey, _Node] = {}
        """(root key, episode, run) → the node that ends where the run ends. A split keeps the lower part's object."""

    def missing(self, item: Item, root: int) -> int:
        """How many tokens `add` would add."""
        node, path, index = self._deepest_known(item, root)
        count = item.row_tokens
        if node is None:
            node = self.roots.get(root)
            if node is None:
                return count
            matched = 0
        else:
            matched = node.start + len(node.ids)
        for run in path[index:]:
            if item.tree.runs[run].call != -1:
                break
            node, same = _follow(node, _prompt_part(item, run))
            matched += same
            if node is None:
                break
        reply = self.known.get((root, item.episode, item.tree.calls[item.call].run))
        if reply is not None:
            return 0
        return count - matched

    def add(self, item: Item, root: int) -> None:
        """Insert the call's reply, and whatever is missing of its prompt."""
        node, path, index = self._deepest_known(item, root)
        if node is None:
            node = self.roots.setdefault(root, _Node(np.zeros(0, np.int32), None, 0))
        for run in path[index:]:
            part = _prompt_part(item, run)
            sampled_by = item.tree.runs[run].call
            node = self._insert_context(node, part) if sampled_by == -1 else self._insert_sampled(node, part)
            if len(part) == len(item.tree.runs[run].ids):
                self.known[root, item.episode, run] = node
        call = item.tree.calls[item.call]
        reply = self.known.get((root, item.episode, call.run))
        if reply is None:
            reply = self._insert_sampled(node, item.tree.runs[call.run].ids)
            self.known[root, item.episode, call.run] = reply
        reply.needed = max(reply.needed, item.last_trained)
        self.items.append((item, node, reply))
        self.unshared += item.row_tokens

    def _deepest_known(self, item: Item, root: int) -> tuple[_Node | None, list[int], int]:
        """The node of the prompt's deepest run that is already here, the prompt's path, and where to continue in it."""
        path = item.tree.path(item.tree.calls[item.call].prompt_run)
        for index in range(len(path) - 1, -1, -1):
            whole = len(_prompt_part(item, path[index])) == len(item.tree.runs[path[index]].ids)
            node = self.known.get((root, item.episode, path[index])) if whole else None
            if node is not None:
                return node, path, index + 1
        return None, path, 0

    def _insert_sampled(self, parent: _Node, ids: IntArray) -> _Node:
        node = _Node(ids, parent, parent.start + len(parent.ids))
        parent.children.append(node)
        self.tokens += len(ids)
        return node

    def _insert_context(self, node: _Node, ids: IntArray) -> _Node:
        while len(ids):
            child = node.context.get(int(ids[0]))
            if child is None:
                child = self._insert_sampled(node, ids)
                node.context[int(ids[0])] = child
                return child
            same = _common(child.ids, ids)
            if same < len(child.ids):
                child = _split(child, same)
            node, ids = child, ids[same:]
        return node

    def pack(self) -> Pack:
        """Lay the forest out."""
        roots = list(self.roots.values())
        for item, prompt, _ in self.items:
            if item.tree.calls[item.call].mask[0]:
                prompt.needed = len(prompt.ids)
        order = _measure(roots)
        total = 0
        for root in roots:
            total = _place(root, total)
        ids = np.zeros(total, np.int64)
        positions = np.zeros(total, np.int64)
        ends = np.zeros(total, np.int64)
        for node in order:
            if node.length:
                here = slice(node.where, node.where + node.length)
                ids[here] = node.ids[: node.length]
                positions[here] = np.arange(node.start, node.start + node.length)
                ends[here] = node.end
        return Pack(self.layout, ids, positions, ends, _blocks(roots), self._edges(), self.unshared)

    def _edges(self) -> Edges:
        calls = [item.tree.calls[item.call] for item, _, _ in self.items]
        tokens = [np.flatnonzero(call.mask) for call in calls]
        counts = [len(token) for token in tokens]
        token = np.concatenate(tokens)
        first = np.cumsum([0, *counts[:-1]])

        def each(values: Iterable[float], kind: type) -> NDArray[Any]:
            """The call's value for each of its edges."""
            return np.repeat(np.fromiter(values, kind, len(calls)), counts)

        position = each((reply.where for _, _, reply in self.items), np.int64) + token - 1
        at_prompt = token[first] == 0
        prompt_end = np.array([prompt.where + len(prompt.ids) - 1 for _, prompt, _ in self.items])
        position[first[at_prompt]] = prompt_end[at_prompt]
        replies = [
            (item.tree.runs[call.run].ids, call.logprobs) for (item, _, _), call in zip(self.items, calls, strict=True)
        ]
        entries = np.array([entry for item, _, _ in self.items for entry in item.entries], np.float64)
        numbers = np.array([len(item.entries) for item, _, _ in self.items])
        edge_numbers = np.repeat(numbers, counts)
        entry_edge = np.repeat(np.arange(len(token)), edge_numbers)
        within = np.arange(len(entry_edge)) - np.repeat(np.cumsum(edge_numbers) - edge_numbers, edge_numbers)
        entry = np.repeat(np.cumsum(numbers) - numbers, counts)[entry_edge] + within
        return Edges(
            position=position,
            target=np.concatenate([ids[chosen] for (ids, _), chosen in zip(replies, tokens, strict=True)]).astype(
                np.int64
            ),
            temperature=each((call.sampling.logprob_temperature for call in calls), np.float64),
            sampler_logprob=np.concatenate(
                [of[chosen] for (_, of), chosen in zip(replies, tokens, strict=True)]
            ).astype(np.float64),
            episode=each((item.episode for item, _, _ in self.items), np.int64),
            call=each((item.call for item, _, _ in self.items), np.int64),
            token=token,
            trajectory=each((item.trajectory for item, _, _ in self.items), np.int64),
            entry_edge=entry_edge,
            entry_advantage=entries[entry, 0],
            entry_weight=entries[entry, 1],
        )


def _prompt_part(item: Item, run: int) -> IntArray:
    """The tokens of a run on the prompt's path that belong to the prompt: the last run may extend beyond it."""
    piece = item.tree.runs[run]
    return piece.ids[: max(0, item.tree.calls[item.call].prompt_tokens - piece.start)]


def _common(one: IntArray, other: IntArray) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _follow(node: _Node, ids: IntArray) -> tuple[_Node | None, int]:
    """Walk down the context: the node reached (None if the context ends before `ids`), and how many tokens matched."""
    matched = 0
    while len(ids):
        child = node.context.get(int(ids[0]))
        if child is None:
            return None, matched
        same = _common(child.ids, ids)
        matched += same
        if same < len(child.ids):
            return None, matched
        node, ids = child, ids[same:]
    return node, matched


def _split(node: _Node, at: int) -> _Node:
    """Split a context node in two; the lower part stays the same object. Returns the upper part."""
    parent = node.parent
    assert parent is not None
    upper = _Node(node.ids[:at], parent, node.start)
    parent.children[parent.children.index(node)] = upper
    parent.context[int(upper.ids[0])] = upper
    node.ids, node.parent, node.start = node.ids[at:], upper, node.start + at
    upper.children.append(node)
    upper.context[int(node.ids[0])] = node
    return upper


def _measure(roots: list[_Node]) -> list[_Node]:
    """Set `size` everywhere and put each node's largest child first. Returns all nodes, parents before children."""
    order = list(roots)
    for node in order:
        order.extend(node.children)
    for node in reversed(order):
        node.size = sum(child.size for child in node.children)
        node.size += node.length
        node.children.sort(key=lambda child: -child.size)
    return order


def _place(root: _Node, start: int) -> int:
    """Lay out a tree from `start`: set `where` and `end` of its nodes. Returns where the tree ends."""
    root.where = start
    stack = [root]
    while stack:
        node = stack.pop()
        node.end = node.where + node.size
        at = node.where + node.length
        for child in node.children:
            child.where = at
            at += child.size
            stack.append(child)
    return start + root.size


def _blocks(roots: list[_Node]) -> Blocks:
    """Cut the forest into rows. Each follows the largest children; the other children's subtrees see the row so far."""
    blocks = Blocks()
    heads = list(reversed(roots))
    while heads:
        head = heads.pop()
        node = head
        branches = []
        while True:
            children = [child for child in node.children if child.size]
            reach = node.where + node.length
            if len(children) > 1:
                if reach > head.where:  # a root without tokens of its own shares nothing
                    blocks.full.append((children[1].where, node.end, head.where, reach))
                branches += children[1:]
            if not children:
                break
            node = children[0]
        if reach > head.where:
            blocks.causal.append((head.where, reach))
        heads += reversed(branches)
    return blocks
