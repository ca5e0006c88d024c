"""`AgenticRollout.generate_sequences` on a `DataProto` of verl. Only the rollout server of verl is scripted."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet.compat.agentic_rollout import AgenticRollout, AgenticRolloutConfig, SimpleAgenticTool
from ajet.engine.model_source import ModelSource
from ajet.schema.errors import UserError
from support.ray_runs import installed

os.environ.setdefault("AJET_PLATFORM", "cpu")  # read when verl is imported
needs_verl = pytest.mark.skipif(not installed("verl"), reason="needs verl: run `make test-verl`")

TOOLS = {"calculator": {}}
REPLIES = ('Thought: I calculate.\nAction: calculator(expression="6*7")', "Action: Final Answer: It is 42.")


class Client:
    """Answers by ids, as verl's client does. A prompt with `broken` gets an error, one with `breaks` in its second
    call."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.said: dict[str, list[tuple[list[int], list[int]]]] = {}
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        asked, said = self.tokenizer.decode(prompt_ids), self.said.setdefault(request_id, [])
        if "broken" in asked or ("breaks" in asked and said):
            raise RuntimeError("the server is gone")
        ids = [*self.tokenizer.encode(REPLIES[len(said)], add_special_tokens=False), self.tokenizer.eos_token_id]
        ids = ids[: sampling_params["max_tokens"]]
        said.append((list(prompt_ids), ids))
        self.asked.append(sampling_params)
        logprobs = [-0.5 * len(said)] * len(ids)
        return SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={})


def prompts(*texts: str, **meta: Any) -> Any:
    import numpy as np
    from verl.protocol import DataProto

    raw, index = np.empty(len(texts), dtype=object), np.arange(len(texts))
    raw[:] = [[{"role": "user", "content": text}] for text in texts]
    return DataProto(batch=None, non_tensor_batch={"raw_prompt": raw, "index": index}, meta_info=meta)


@needs_verl
def test_tokens_masks_and_logprobs_are_those_of_sampling(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    client = Client(tokenizer)
    config = AgenticRolloutConfig(max_steps=4, tools_config=TOOLS, temperature=0.3)
    made = asyncio.run(
        AgenticRollout(config, client, tokenizer).generate_sequences(
            prompts("What is 6*7?", "broken", "And 6*7?", global_steps=3)
        )
    )
    assert made.non_tensor_batch["responses"].tolist() == ["It is 42.", "", "It is 42."]
    assert made.non_tensor_batch["index"].tolist() == [0, 1, 2] and made.meta_info["global_steps"] == 3
    trajectories = made.non_tensor_batch["trajectories"].tolist()
    assert len({each["request_id"] for each in trajectories}) == 3
    assert "the server is gone" in str(trajectories[1])
    tensors = made.batch
    width, length = tensors["prompts"].shape[1], tensors["responses"].shape[1]
    for row in (0, 2):
        (first_prompt, first), (second_prompt, second) = client.said[trajectories[row]["request_id"]]
        expected = [*second_prompt[len(first_prompt) :], *second]
        assert second_prompt[: len(first_prompt) + len(first)] == first_prompt + first
        between = len(expected) - len(first) - len(second)
        padding, pad = [0] * (length - len(expected)), tokenizer.pad_token_id
        assert tensors["prompts"][row].tolist() == [pad] * (width - len(first_prompt)) + first_prompt
        assert tensors["responses"][row].tolist() == expected + [pad] * len(padding)
        mask = [1] * len(first) + [0] * between + [1] * len(second)
        assert tensors["response_mask"][row].tolist() == mask + padding
        logprobs = [-0.5] * len(first) + [0.0] * between + [-1.0] * len(second)
        assert tensors["rollout_log_probs"][row].tolist() == logprobs + padding
        attended = tensors["attention_mask"][row].bool()
        assert tensors["input_ids"][row][attended].tolist() == first_prompt + expected
        assert tensors["position_ids"][row][attended].tolist() == list(range(len(first_prompt) + len(expected)))
    assert tensors["response_mask"][1].sum() == 0 and tensors["rm_scores"][1].sum() == 0
    assert {asked["temperature"] for asked in client.asked} == {0.3}
    assert not any({"stop", "seed"} & asked.keys() for asked in client.asked), "not every server of verl's takes them"
    assert "an episode on 1-" in caplog.text and "the server is gone" in caplog.text


@needs_verl
def test_sampled_tokens_that_are_in_no_row_are_counted() -> None:
    tokenizer = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    client, config = Client(tokenizer), AgenticRolloutConfig(max_steps=4, tools_config=TOOLS)
    asked = prompts("What is 6*7?", "It breaks.", "broken", prompt_length=4096, response_length=30)
    made = asyncio.run(AgenticRollout(config, client, tokenizer).generate_sequences(asked))
    whole, broke, _ = (client.said[one["request_id"]] for one in made.non_tensor_batch["trajectories"])
    (_, first), (_, second) = whole
    assert len(first) < 30 and made.batch["response_mask"].sum(1).tolist() == [len(first), 0, 0]
    assert made.non_tensor_batch["ajet_left_out"].tolist() == [len(second), len(broke[0][1]), 0]


@needs_verl
def test_one_rollout_makes_many_batches_and_its_tools_run_on_the_callers_loop() -> None:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    loops = set()

    class Answer(SimpleAgenticTool):
        async def simple_execute(self, parameters: dict[str, Any]) -> Any:
            loops.add(asyncio.get_running_loop())
            return 42

    tokenizer = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    rollout = AgenticRollout(AgenticRolloutConfig(max_steps=4), Client(tokenizer), tokenizer)
    rollout.agent.set_tools({"calculator": Answer("calculator", "Calculates.", {"expression": {"type": "string"}})})

    async def batch() -> Any:
        made = await rollout.generate_sequences(prompts("What is 6*7?", "And 6*7?"))
        assert loops == {asyncio.get_running_loop()}
        loops.clear()
        return made.non_tensor_batch["responses"].tolist()

    with initialize_config_module("verl.trainer.config", version_base=None):  # as in a program with `@hydra.main`
        assert [asyncio.run(batch()) for _ in range(2)] == [["It is 42.", "It is 42."]] * 2
        assert GlobalHydra.instance().is_initialized()


@needs_verl
def test_each_batch_saves_its_own_trajectories(tmp_path: Path) -> None:
    async def model(messages: list[dict[str, str]], max_tokens: int = 0, temperature: float = 0.0) -> str:
        return "Final Answer: 42"

    config = AgenticRolloutConfig(save_trajectories=True, trajectory_save_path=str(tmp_path))
    rollout = AgenticRollout(config, model)
    for _ in range(3):
        asyncio.run(rollout.generate_sequences(prompts("one", "two")))
    assert len(list(tmp_path.glob("*.jsonl"))) == 6


@needs_verl
def test_a_function_of_text_gives_no_tensors() -> None:
    replies = iter(REPLIES)

    async def model(messages: list[dict[str, str]], max_tokens: int = 0, temperature: float = 0.0) -> str:
        return next(replies)

    config = AgenticRolloutConfig(max_steps=4, tools_config=TOOLS, include_trajectory_in_output=False)
    made = asyncio.run(AgenticRollout(config, model).generate_sequences(prompts("What is 6*7?")))
    assert made.batch is None and made.non_tensor_batch["responses"].tolist() == ["It is 42."]
    assert made.non_tensor_batch["final_rewards"].tolist() == [0.0] and "trajectories" not in made.non_tensor_batch


@needs_verl
def test_what_is_missing_is_said() -> None:
    from verl.protocol import DataProto

    rollout = AgenticRollout(AgenticRolloutConfig(), Client(None))
    with pytest.raises(UserError, match="needs the model's tokenizer"):
        asyncio.run(rollout.generate_sequences(prompts("?")))
    gone = SimpleNamespace(name_or_path="/nowhere/model")
    with pytest.raises(UserError, match=r"tokenizer.name_or_path names, '/nowhere/model'"):
        asyncio.run(AgenticRollout(AgenticRolloutConfig(), Client(None), gone).generate_sequences(prompts("?")))
    import numpy as np

    empty = DataProto(batch=None, non_tensor_batch={"index": np.arange(2)})
    with pytest.raises(UserError, match=r"needs `raw_prompt`.*it has index"):
        asyncio.run(rollout.generate_sequences(empty))


@pytest.mark.skipif(installed("verl"), reason="verl is here")
def test_without_verl_it_says_so_before_anything_runs() -> None:
    with pytest.raises(UserError, match="generate_sequences needs verl"):
        asyncio.run(AgenticRollout(AgenticRolloutConfig()).generate_sequences(None))
