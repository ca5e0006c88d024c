from __future__ import annotations

from tracker_families import tokenizer

from ajet.context_tracker import ContextTracker, Renderer, TrackerSettings, linear_samples
from ajet.schema.codec import decode_episode, encode_episode
from ajet.schema.episode import EpisodeStatus
from ajet.schema.generation import Completion, Sampling


def test_a_linear_episode_is_one_sample_and_survives_storage() -> None:
    tok = tokenizer("qwen2_5")
    renderer = Renderer(tok)
    tracker = ContextTracker(renderer, TrackerSettings(), episode_id="e")
    messages = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "What is 3?"}]
    for turn in range(5):
        call = tracker.begin("a", "t", messages, [], Sampling())
        assert call.prompt_ids == renderer.render(messages)
        ids = [*tok.encode(f"It is {turn}."), tok.eos_token_id]
        reply = {"role": "assistant", "content": f"It is {turn}."}
        tracker.commit(call.call_id, Completion(ids, [-0.5] * len(ids), "stop", tok.eos_token_id), reply)
        messages = [*messages, reply, {"role": "user", "content": f"and {turn}?"}]
    episode = tracker.finish(1.0, EpisodeStatus.COMPLETED)
    samples, ledger = linear_samples(episode.tree, max_prompt_length=999, max_response_length=999, max_samples=9)
    assert len(samples) == 1
    assert ledger.trained == episode.ledger.captured == samples[0].response_mask.sum()
    assert decode_episode(encode_episode(episode)).tree.isomorphic(episode.tree)
