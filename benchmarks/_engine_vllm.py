"""Runs one load on vLLM inside this process, turn by turn, and prints seconds as JSON. For an environment with vLLM."""

from __future__ import annotations

import json
import os
import sys
import time

from _engine_load import Load

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ON_CPU = sys.argv[5:] != ["cuda"]
if ON_CPU:
    os.environ |= {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def main() -> None:
    """`_engine_vllm.py FOLDER CONVERSATIONS TURNS PREFIX_CACHE [cuda]`"""
    from vllm import LLM, SamplingParams

    folder, load, cached = sys.argv[1], Load(int(sys.argv[2]), int(sys.argv[3])), sys.argv[4] == "1"
    llm = LLM(
        folder,
        dtype="float32" if ON_CPU else "bfloat16",
        enforce_eager=ON_CPU,
        max_model_len=2048,
        max_num_seqs=128,
        enable_prefix_caching=cached,
        logprobs_mode="processed_logprobs",
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=load.reply, logprobs=0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
    prompts: list[list[int]] = [[] for _ in range(load.conversations)]
    cpu, wall = time.process_time(), time.perf_counter()
    for messages in zip(*load.messages(), strict=True):
        prompts = [prompt + message for prompt, message in zip(prompts, messages, strict=True)]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        prompts = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    print(json.dumps({"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}))


if __name__ == "__main__":
    main()
