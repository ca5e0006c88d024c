"""What tests ask of an episode's call tree."""

from __future__ import annotations

import hashlib

from ajet.schema.episode import ROOT, Call, CallTree, Episode


def isomorphic(one: CallTree, other: CallTree) -> bool:
    """Whether two trees are the same up to the names and the order of their calls."""
    return len(one.runs) == len(other.runs) and _digest(one) == _digest(other)


def _digest(tree: CallTree) -> bytes:
    """Of what was sampled in which context: tokens, logprobs, masks, versions, agents, targets, finish reasons and
    rewards; not times, not names."""
    children = tree.children()
    digests: list[bytes] = [b""] * len(tree.runs)
    asked: dict[int, list[bytes]] = {}
    for call in tree.calls:
        if call.run == ROOT:
            asked.setdefault(call.prompt_run, []).append(_call_digest(call))
    for index in range(len(tree.runs) - 1, -1, -1):
        run = tree.runs[index]
        digest = hashlib.blake2b(run.ids.tobytes(), digest_size=16)
        digest.update(b"context" if run.call == ROOT else _call_digest(tree.calls[run.call]))
        for part in sorted(asked.get(index, [])) + sorted(digests[child] for child in children[index]):
            digest.update(part)
        digests[index] = digest.digest()
    return b"".join(sorted(digests[index] for index, run in enumerate(tree.runs) if run.parent == ROOT))


def _call_digest(call: Call) -> bytes:
    digest = hashlib.blake2b(call.logprobs.tobytes(), digest_size=16)
    digest.update(call.mask.tobytes())
    facts = (call.agent, call.target, call.prompt_tokens, call.versions, call.finish_reason, call.trainable, call.drop)
    digest.update(repr((*facts, call.reward, call.replaces_outcome)).encode())
    return digest.digest()


def weights_version(episode: Episode) -> int | None:
    """The newest version of the weights that sampled a token of it; None if none was sampled."""
    return max((version for call in episode.tree.calls for _, version in call.versions), default=None)
