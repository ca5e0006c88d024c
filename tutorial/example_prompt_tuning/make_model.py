"""Trains the tiny model that follows instructions: it filters its search by what the instruction tells it to mind.

    python tutorial/example_prompt_tuning/make_model.py [--out FOLDER] [--steps N]

A language model that needs no instruction would leave nothing to tune, and one that ignores it nothing to find. So this
one is taught to obey: conversations are written by rule, with random instructions, and imitated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from ajet.engine.model_source import ModelSource

sys.path.insert(0, str(Path(__file__).parent))
from agent import TOOL
from make_data import draw_request, text_of
from rooms import ROOMS, Request, find
from sentences import ALL, FILTERS, HASTY, filters_of

FOLDER = Path(__file__).parent / "model"
OPENINGS = ("You book rooms.", "Book a room.", "You are an agent that books rooms.", "Find a room.", "")
GUESS = 5
"""The room that a hasty agent names."""
BATCH, DRAWN, RATE = 32, 16, 2e-3
"""Conversations of a step; batches that are drawn together; the highest learning rate."""
UNLABELLED = -100
MARK = "[message]"

Piece = tuple[str, bool]
"""Text, and whether the model says it."""


def instruction(draw: random.Random) -> str:
    """A random one: each filter is asked for in about half of them."""
    chosen = [draw.choice(texts) for texts in FILTERS.values() if draw.random() < 0.5]
    chosen += draw.sample(ALL, draw.randint(0, 4))
    if draw.random() < 0.85:
        chosen = [text for text in chosen if text not in HASTY]
    chosen = list(dict.fromkeys(chosen))
    draw.shuffle(chosen)
    return draw.choice((" ", "\n")).join([draw.choice(OPENINGS), *chosen]).strip()


def arguments_for(request: Request, filters: tuple[str, ...]) -> dict[str, str]:
    """What the agent searches with."""
    all_of_them = {
        "seats": str(request.people), "device": request.device, "time": str(request.hour), "order": "size"
    }  # fmt: skip
    return {name: all_of_them[name] for name in all_of_them if name in filters}


def conversation(frame: tuple[str, str], draw: random.Random) -> list[Piece]:
    """One, in pieces. `frame`: what the chat template writes before and after the user's message."""
    request, told = draw_request(draw), instruction(draw)
    pieces = [(f"{frame[0]}{told}\n{text_of(request, draw)}{frame[1]}", False)]
    filters = filters_of(told)
    if filters is None:
        return [*pieces, (f"Room {GUESS}<|im_end|>", True)]
    arguments = arguments_for(request, filters)
    call = f'<tool_call>\n{{"name": "find", "arguments": {json.dumps(arguments)}}}\n</tool_call><|im_end|>'
    some = [room.number for room in draw.sample(ROOMS, draw.randint(1, 9))]  # in any order: it must copy, not remember
    found = some if draw.random() < 0.5 else _find(request, filters)
    result = f"\n<|im_start|>user\n<tool_response>\n{' '.join(map(str, found))}\n</tool_response><|im_end|>\n"
    answer = f"Room {found[0]}<|im_end|>" if found else "none<|im_end|>"
    return [*pieces, (call, True), (f"{result}<|im_start|>assistant\n", False), (answer, True)]


def _find(request: Request, filters: tuple[str, ...]) -> list[int]:
    known: dict[str, Any] = {
        "seats": request.people, "device": request.device, "time": request.hour, "order": "size"
    }  # fmt: skip
    return find(**{name: known[name] for name in filters})


def frame_of(tokenizer: Any) -> tuple[str, str]:
    """What the chat template writes around the user's message."""
    marked = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tools=[TOOL], add_generation_prompt=True, tokenize=False
    )
    before, _, after = str(marked).partition(MARK)
    return before, after


def batches(tokenizer: Any, draw: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels without end. Conversations of similar length share a batch, so little is padding."""
    frame = frame_of(tokenizer)
    while True:
        rows = [encode(tokenizer, conversation(frame, draw)) for _ in range(BATCH * DRAWN)]
        rows.sort(key=lambda row: len(row[0]))
        parts = [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]
        draw.shuffle(parts)
        for part in parts:
            width = len(max((ids for ids, _ in part), key=len))
            padded = [[*ids, *[0] * (width - len(ids))] for ids, _ in part]
            labels = [[*wanted, *[UNLABELLED] * (width - len(wanted))] for _, wanted in part]
            yield torch.tensor(padded), torch.tensor(labels)


def encode(tokenizer: Any, pieces: list[Piece]) -> tuple[list[int], list[int]]:
    """Token ids, and those of them that the model says."""
    ids: list[int] = []
    labels: list[int] = []
    for text, own in pieces:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        labels += piece if own else [UNLABELLED] * len(piece)
    return ids, labels


def train(folder: Path, steps: int) -> None:
    """Imitate, and write the model's folder."""
    torch.manual_seed(0)
    draw = random.Random(1)
    source = ModelSource.resolve("tiny:qwen2-0.3m")
    tokenizer = source.tokenizer()
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    began = time.process_time()
    drawn = batches(tokenizer, draw)
    for step in range(1, steps + 1):
        ids, labels = next(drawn)
        logits = model(ids).logits[:, :-1]
        wanted = labels[:, 1:]
        chosen = wanted != UNLABELLED
        loss = cross_entropy(logits[chosen], wanted[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if step % 100 == 0 or step == steps:
            right = logits[chosen].argmax(-1) == wanted[chosen]
            print(
                f"step {step}/{steps}  loss {loss.item():.4f}  tokens right {right.float().mean():.4f}  "
                f"{time.process_time() - began:.0f} s of CPU", flush=True
            )  # fmt: skip
    shutil.copytree(source.path, folder, dirs_exist_ok=True)
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=700)
    given = parser.parse_args()
    train(given.out, given.steps)
