"""`ModelSource`: a model by its `tiny:<name>`, local folder or Hugging Face id. Light to import; loads on demand.

The `tiny:` models are small, deterministic and built offline: for tests, for teaching, and to try a workflow. They are
written as ordinary Hugging Face folders. Weights are drawn tensor by tensor, in the order of their names, from one
fixed seed: they are the same in every process and under every version of transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ajet.engine.tiny_tokenizer import (
    END_OF_TEXT,
    MESSAGE_END,
    TOKENIZER_VERSION,
    VOCABULARY_SIZE,
    token_id,
    write_tokenizer,
)
from ajet.schema.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY = "tiny:"
LOADING = threading.RLock()
"""Two threads often load tokenizer and weights at the same time, and transformers' lazy imports are circular: threads
that enter such a circle from different ends would see half-initialised modules."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded."""

    name: str
    """What the user wrote."""
    path: str
    """What transformers and vLLM load: a folder or a hub id."""

    @classmethod
    def resolve(cls, name: str | Path) -> ModelSource:
        """Find the model. Tiny models are built on first use; hub ids are downloaded only when loaded."""
        name = str(name)
        if name.startswith(TINY) or name == TINY.rstrip(":"):
            from ajet.engine.model_source import tiny_folder

            return cls(name, str(tiny_folder(name.removeprefix(TINY.rstrip(":")).removeprefix(":"))))
        folder = Path(name).expanduser()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise ConfigError(f"model folder {name} has no config.json: point model.path to a Hugging Face folder")
            return cls(name, str(folder))
        if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigError(f"model folder {name!r} does not exist (model.path: a folder, a hub id, or tiny:<name>)")
        return cls(name, name)

    def folder(self) -> Path | None:
        """Where its files are on this machine. None: a hub id whose config.json isn't in the hub's cache."""
        if Path(self.path).is_dir():
            return Path(self.path)
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.path, "config.json")
        return Path(found).parent if isinstance(found, str) else None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer."""
        self._go_offline_without_hub()
        try:
            with LOADING:
                tokenizer: PreTrainedTokenizerBase = _tokenizer_loader(self.path).from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tokenizer of model {self.name!r} could not be loaded: {error}") from error
        return tokenizer

    def model(
        self, dtype: str = "auto", attn: str = "auto", device: str | None = None, base_bits: int | None = None
    ) -> PreTrainedModel:
        """Load the weights in evaluation mode. `auto`: SDPA attention (plain attention for models that have no other),
        bfloat16 on a GPU, float32 on a CPU.

        `base_bits`: 4 stores linear layers in 4 bits, as the frozen base of adapters.
        """
        self._go_offline_without_hub()
        try:
            with LOADING:
                import torch
                from transformers import AutoModelForCausalLM

                device = device or ("cuda" if torch.cuda.is_available() else "cpu")
                with _no_progress_bar():
                    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                        self.path,
                        dtype=torch_dtype(dtype, device),
                        attn_implementation=None if attn == "auto" else attn,
                    )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"model {self.name!r} could not be loaded: {error}") from error
        untyped: Any = model
        if base_bits is not None:
            from ajet.engine.quantization import quantise

            quantise(untyped, device)
        untyped.to(device).eval()
        return model

    def config(self) -> Any:
        """The model's configuration, as transformers reads it."""
        self._go_offline_without_hub()
        with LOADING:
            import transformers

            try:
                return transformers.AutoConfig.from_pretrained(self.path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"the config.json of model {self.name!r} can't be read: {error}") from error

    def on_meta(self, dtype: str, device: str) -> PreTrainedModel | None:
        """The model without its weights, on PyTorch's `meta` device, as it would be loaded on `device`.

        From its config.json, if that is at hand: in the folder, in the hub's cache, or as a well-known shape. Nothing
        is downloaded. None if its config isn't known.
        """
        with LOADING:
            import torch
            import transformers

            try:
                found: Any = transformers.AutoConfig.from_pretrained(self.path, local_files_only=True)
            except (OSError, ValueError) as error:
                if Path(self.path).is_dir():
                    raise ConfigError(f"the config.json of model {self.name!r} can't be read: {error}") from error
                shape = known_shapes().get(self.path)
                if shape is None:
                    return None
                found = transformers.AutoConfig.for_model(**shape)
            try:
                with torch.device("meta"):
                    # every model has plain attention; a plan replaces it anyway
                    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                        found, dtype=torch_dtype(dtype, device), attn_implementation="eager"
                    )
            except (OSError, ValueError, ImportError) as error:
                why = str(error).partition("\n")[0]  # then every class that there is
                raise ConfigError(
                    f"model {self.name!r} can't be built: {why} Choose a causal language model, such as Qwen3 or Llama"
                ) from error
        untyped: Any = model
        untyped.eval()
        return model

    def _go_offline_without_hub(self) -> None:
        """Set the hub's library offline if the hub can't be reached: it would retry each file for a minute."""
        if not Path(self.path).is_dir() and not _hub_is_reachable():
            from huggingface_hub import constants

            constants.HF_HUB_OFFLINE = True


@cache
def known_shapes() -> dict[str, dict[str, Any]]:
    """The config.json of well-known models, as far as it decides their sizes, by hub id."""
    file = Path(__file__).with_name("known_shapes.json")
    shapes: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["shapes"]
    return shapes


@cache
def _hub_is_reachable() -> bool:
    from huggingface_hub.constants import ENDPOINT

    if getproxies():
        return True  # the proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _tokenizer_loader(path: str) -> Any:
    """Avoids `AutoTokenizer` when the class is known: it imports torch, which takes a second."""
    if _has_tiny_tokenizer(Path(path)):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _has_tiny_tokenizer(folder: Path) -> bool:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return False
    from ajet.engine.tiny_tokenizer import MARK

    return bool(json.loads(file.read_text(encoding="utf-8")).get(MARK))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers' progress bars out of our output."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def torch_dtype(name: str, device: str) -> torch.dtype:
    """The dtype that `model.dtype` names."""
    import torch

    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"model.dtype {name!r} isn't a number format: use auto, float32, bfloat16 or float16")
    return found


WEIGHTS_VERSION = 1
"""Raised whenever a model of the same name would come out differently."""
SEED = 20260101
WEIGHT_STD = 0.05
"""More than the usual 0.02: with that, so small a model would hardly react to its input."""
MAX_POSITIONS = 32768
FAMILIES = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True, slots=True)
class TinySize:
    """The shape of a model. Head sizes are at least 32, as vLLM's CPU build requires."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int


SIZES = {
    "0.3m": TinySize(hidden=128, layers=2, heads=4, kv_heads=2, head_size=32, intermediate=192),
    "3m": TinySize(hidden=256, layers=4, heads=8, kv_heads=4, head_size=32, intermediate=640),
    "30m": TinySize(hidden=512, layers=10, heads=8, kv_heads=4, head_size=64, intermediate=1408),
}


@dataclass(frozen=True, slots=True)
class TinyName:
    """A parsed `tiny:` name."""

    family: str
    size: str

    @classmethod
    def parse(cls, name: str) -> TinyName:
        """Read what follows `tiny:`: `qwen2-0.3m`, `qwen3`, `30m`, or nothing."""
        family, size = "qwen2", "0.3m"
        for part in filter(None, name.lower().split("-")):
            if part in FAMILIES:
                family = part
            elif part in SIZES:
                size = part
            else:
                raise ConfigError(
                    f"model 'tiny:{name}' does not exist (model.path): {part!r} is neither a family "
                    f"({', '.join(FAMILIES)}) nor a size ({', '.join(SIZES)}). Example: tiny:qwen2-0.3m"
                )
        return cls(family, size)

    def __str__(self) -> str:
        return f"{self.family}-{self.size}"


def model_config(name: TinyName) -> dict[str, Any]:
    """The content of `config.json`."""
    size = SIZES[name.size]
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[name.family]
    return {
        "architectures": [architecture],
        "model_type": name.family,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": WEIGHT_STD,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": token_id(MESSAGE_END),
        "pad_token_id": token_id(END_OF_TEXT),
        "torch_dtype": "float32",
    }


def cache_folder() -> Path:
    """Where built models are kept: `AJET_CACHE`, or `~/.cache/ajet`."""
    return Path(os.environ.get("AJET_CACHE") or Path.home() / ".cache" / "ajet")


def tiny_folder(name: str) -> Path:
    """The folder of a tiny model, built on first use. Several processes may ask at the same time."""
    parsed = TinyName.parse(name)
    folder = cache_folder() / "tiny" / f"{parsed}-v{WEIGHTS_VERSION}.{TOKENIZER_VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{parsed}-", dir=folder.parent))
        try:
            write_model(draft, parsed)
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def write_model(folder: Path, name: TinyName) -> None:
    """Write configuration, weights and tokenizer."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(model_config(name), indent=2))
    ends = {"eos_token_id": [token_id(MESSAGE_END), token_id(END_OF_TEXT)], "pad_token_id": token_id(END_OF_TEXT)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    save_file(draw_weights(name), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, name.family)


def draw_weights(name: TinyName) -> dict[str, torch.Tensor]:
    """The model's tensors under Hugging Face's names: norms are 1, biases 0, matrices normally distributed."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for key, shape in sorted(weight_shapes(name).items()):
        if key.endswith("norm.weight"):
            weights[key] = torch.ones(shape)
        elif key.endswith(".bias"):
            weights[key] = torch.zeros(shape)
        else:
            weights[key] = torch.randn(shape, generator=generator) * WEIGHT_STD
    return weights


def weight_shapes(name: TinyName) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor; the output layer shares the embedding's."""
    size = SIZES[name.size]
    query, keys = size.heads * size.head_size, size.kv_heads * size.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY_SIZE, size.hidden),
        "model.norm.weight": (size.hidden,),
    }
    for layer in range(size.layers):
        part = {
            "input_layernorm.weight": (size.hidden,),
            "post_attention_layernorm.weight": (size.hidden,),
            "self_attn.q_proj.weight": (query, size.hidden),
            "self_attn.k_proj.weight": (keys, size.hidden),
            "self_attn.v_proj.weight": (keys, size.hidden),
            "self_attn.o_proj.weight": (size.hidden, query),
            "mlp.gate_proj.weight": (size.intermediate, size.hidden),
            "mlp.up_proj.weight": (size.intermediate, size.hidden),
            "mlp.down_proj.weight": (size.hidden, size.intermediate),
        }
        if name.family == "qwen2":
            part |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (keys,)}
            part |= {"self_attn.v_proj.bias": (keys,)}
        if name.family == "qwen3":
            part |= {"self_attn.q_norm.weight": (size.head_size,), "self_attn.k_norm.weight": (size.head_size,)}
        shapes |= {f"model.layers.{layer}.{key}": shape for key, shape in part.items()}
    return shapes
