"""The embedded trainer and engine as Trinity's, on the CPU.

It trains what comes through Trinity's buffer: the experiences of an episode become a call tree with a path for each,
their tokens, masks, logprobs and credit unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from trinity.common.config import Config as TrinityConfig
from trinity.common.config import InferenceModelConfig
from trinity.common.constants import SyncMethod
from trinity.common.experience import Experience
from trinity.common.models.allocator import Allocator, get_model_wrapper
from trinity.common.models.model import InferenceModel, ModelWrapper
from trinity.manager.synchronizer import Synchronizer
from trinity.trainer.trainer import TrainEngineWrapper

from ajet.backbone.ray.credit import SEGMENTS
from ajet.backbone.ray.facts import RunPayload
from ajet.backbone.ray.rows import AGENT, ROW, ordered
from ajet.backbone.training_settings import train_settings
from ajet.engine.model_source import ModelSource
from ajet.engine.torch import TorchEngine, TorchEngineSettings
from ajet.schema.chat import Completion, GenerateRequest, Sampling
from ajet.schema.episode import ROOT, Call, CallTree, IntArray, Run
from ajet.trainer.checkpoint import CheckpointFolder, read_trainer, write_trainer
from ajet.trainer.credit import CallCredit, EpisodeCredit, LossNorm
from ajet.trainer.trainer import Updater

WEIGHTS = "actor/huggingface"


class CpuTrainEngine(TrainEngineWrapper):  # type: ignore[misc]
    """Built by Trinity's trainer."""

    def __init__(self, config: TrinityConfig) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        run = RunPayload.decode(config.algorithm.advantage_fn_args["payload"])
        self._config = run.load_config()
        self._folder = Path(config.checkpoint_job_dir)
        self._resumes = bool(config.continue_from_checkpoint)
        self._step = 0
        self._temperature = self._config.ajet.rollout.temperature
        self._norm = LossNorm(self._config.ajet.trainer_common.algorithm.loss_norm)
        settings = train_settings(self._config, run.total_steps)
        source = ModelSource.resolve(run.model_path)
        self._tokenizer = source.tokenizer()
        model, attention = self._config.ajet.model, self._config.ajet.model.attn
        reference: Any = source.model(model.dtype, attention) if settings.loss.kl_coef else None
        self._trainer = Updater(
            source.model(model.dtype, attention),
            settings,
            reference=reference.requires_grad_(False) if reference is not None else None,
        )
        keep = self._config.ajet.trainer_common.keep_checkpoints
        self._checkpoints = CheckpointFolder(self._folder, keep=keep, keep_best=False)
        self._synchronizer = Synchronizer.get_actor(namespace=config.synchronizer.ray_namespace)

    async def prepare(self) -> None:
        newest = self._checkpoints.newest() if self._resumes else None
        if newest is not None:
            read_trainer(self._trainer, newest)
            self._step = newest.step
            await self.upload_state_dict()

    @property
    def train_step_num(self) -> int:
        return self._step

    async def train_step(self, batch_exps: list[Experience]) -> dict[str, float]:
        # `WholeBatches` has put them by length, and the mini-batches are drawn here
        metrics = self._trainer.update(trees_of(ordered(batch_exps), self._temperature, self._norm))
        self._step += 1
        return metrics

    async def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        """All that a resumed run needs, and the weights in Hugging Face form."""
        if (self._folder / f"step_{self._step}").exists():
            return
        self._checkpoints.save(
            self._step,
            {},
            lambda folder: write_trainer(self._trainer, self._tokenizer, folder),
        )

    async def upload_state_dict(self) -> None:
        """Hand the weights to Trinity's synchronizer, in memory."""
        weights = {name: tensor.detach().clone() for name, tensor in self._trainer.model.state_dict().items()}
        await self._synchronizer.set_model_state_dict.remote(weights, self._step)

    async def save_state_dict(self) -> None:
        """Write the weights to the folder that Trinity's synchronizer watches."""
        folder = self._folder / f"global_step_{self._step}" / WEIGHTS
        self._trainer.model.save_pretrained(folder)
        scratch = self._folder / ".latest"
        scratch.write_text(str(self._step))
        scratch.replace(self._folder / "latest_state_dict_iteration.txt")

    # Only with GPUs.

    def sync_weight_nccl(self) -> None:
        raise NotImplementedError("NCCL needs GPUs: synchronizer.sync_method: memory")

    async def _nothing(self, *_: Any, **__: Any) -> None: ...

    get_weight_sync_info = setup_weight_sync_group = teardown_weight_sync_group = _nothing


def trees_of(rows: Sequence[Experience], temperature: float, norm: LossNorm) -> list[tuple[CallTree, EpisodeCredit]]:
    """The episodes that experiences stand for, as call trees, and their credit."""
    episodes: dict[str, tuple[CallTree, EpisodeCredit]] = {}
    for row in rows:
        name = row.info[ROW].rsplit("_", 1)[0]
        tree, credit = episodes.setdefault(name, (CallTree(), EpisodeCredit(name, [], norm=norm)))
        _append_path(tree, credit, row, temperature)
    return list(episodes.values())


def _append_path(tree: CallTree, credit: EpisodeCredit, row: Experience, temperature: float) -> None:
    """Add a row as a path of its own."""
    ids = row.tokens.numpy().astype(np.int32)
    prompt = int(row.prompt_length)
    end = _append(tree, ids[:prompt], ROOT, 0)
    at = prompt
    for _, begin, stop in row.info[SEGMENTS]:
        start, finish = prompt + begin, prompt + stop
        if start > at:
            end = _append(tree, ids[at:start], end, at)
        index = len(tree.calls)
        run = _append(tree, ids[start:finish], end, start, call=index)
        tree.calls.append(
            Call(
                name=f"{row.info[ROW]}/{index}",
                agent=row.info[AGENT],
                target="",
                turn=index,
                prompt_run=end,
                prompt_tokens=start,
                run=run,
                logprobs=row.logprobs[begin:stop].numpy().astype(np.float32),
                mask=np.ones(stop - begin, np.bool_),
                sampling=Sampling(temperature=temperature),
            )
        )
        advantage, weight = float(row.advantages[begin]), float(row.returns[begin])
        credit.calls.append(CallCredit([(advantage, weight)] if weight else []))
        end, at = run, finish


def _append(tree: CallTree, ids: IntArray | Sequence[int], parent: int, start: int, call: int = ROOT) -> int:
    tree.runs.append(Run(np.asarray(ids, np.int32), parent, start, call))
    return len(tree.runs) - 1


class CpuRolloutModel(InferenceModel):  # type: ignore[misc]
    """One engine in one Ray actor."""

    def __init__(self, config: InferenceModelConfig) -> None:
        super().__init__(config)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        settings = TorchEngineSettings(max_model_len=config.max_model_len or 4096, seed=config.seed, dtype="float32")
        self._engine = TorchEngine(ModelSource.resolve(str(config.model_path)), settings)
        self._version = 0

    async def prepare(self) -> None:
        await self._engine.ready()
        self._synchronizer = Synchronizer.get_actor(namespace=self.config.ray_namespace)
        self._prepared = True

    async def draw(self, request: GenerateRequest) -> Completion:
        return await self._engine.generate(request)

    async def sync_model_weights(self, model_version: int, method: SyncMethod, timeout: float = 1200) -> int:
        if method == SyncMethod.CHECKPOINT:
            folder = Path(str(self.config.checkpoint_job_dir), f"global_step_{model_version}", WEIGHTS)
            weights = load_file(folder / "model.safetensors")
        else:
            weights, model_version = await self._synchronizer.get_model_state_dict.remote()
        if weights:
            # Ray's tensors lie in its store and can't be written to
            await self._engine.load_weights({name: tensor.clone() for name, tensor in weights.items()}, model_version)
            self._version = model_version
        return self._version

    def get_model_version(self) -> int:
        return self._version

    async def shutdown(self) -> None:
        await self._engine.aclose()


class CpuAllocator(Allocator):  # type: ignore[misc]
    """Trinity's allocator, with our rollout model for each of its engines."""

    async def create_engine(self, config: InferenceModelConfig, role: str, engine_id: int) -> ModelWrapper:
        from copy import deepcopy

        config = deepcopy(config)
        config.engine_id = engine_id
        name = self.get_actor_name(role, engine_id, 0)
        return await get_model_wrapper(
            CpuRolloutModel, config, self.pg, [(name, self.bundle_result.actor_bundle_map[name])]
        )
