"""`ModelSource`: a model by its `tiny:<name>`, local folder or Hugging Face id. Light to import; loads on demand."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

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
            from ajet.engine.tiny_models import tiny_folder

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
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(self.path, "config.json")
        except HFValidationError:  # no name that the hub could have
            return None
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
        from safetensors import SafetensorError

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
        except SafetensorError as error:
            raise ConfigError(f"the weights of model {self.name!r} are damaged, or not all there: {error}") from error
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


def stored_weights(folder: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights in a Hugging Face folder, by their names in this model: a file names each expert's, the model all
    experts' together. Raises a `ValueError` if they are another model's."""
    kind: Any = type(model)
    with LOADING, _no_progress_bar():
        loaded, found = kind.from_pretrained(
            folder,
            config=model.config,
            dtype=model.dtype,
            attn_implementation="eager",  # it computes nothing
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, found[f"{what}_keys"])):
            raise ValueError(f"{what}: {', '.join(names[:3])}")
    weights: dict[str, torch.Tensor] = loaded.state_dict()
    return weights


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
