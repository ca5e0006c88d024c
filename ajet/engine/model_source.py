"""`ModelSource`: a model by its `tiny:<name>`, local folder or Hugging Face id. Light to import; loads on demand."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies
from zipfile import is_zipfile

from ajet.schema.errors import AjetError, ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

TINY = "tiny:"
NAME_GAPS: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Has transformers say which weights it didn't find, instead of drawing them at random."""
CONFIG_UNREADABLE = "the config.json of model {} can't be used"
ABSENT = ("missing_entries", "connection_errors")
WEIGHTS_OR_JSON = (".json", ".safetensors", ".bin")
OTHER_SENSES = {"audio_config", "vision_config"}
"""Parts of a config.json that transformers drops, with their weights, where it has a model's text part alone."""
LFS_POINTER = b"version https://git-lfs"
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
                raise ConfigError(f"model folder {name} has no config.json: name a Hugging Face folder")
            return cls(name, str(folder))
        if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigError(f"model folder {name!r} does not exist: name a folder, a hub id, or tiny:<name>")
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
        with self._reading("the tokenizer of model {} could not be loaded"):
            loader = _tokenizer_loader(self.path)
            tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(self.path, trust_remote_code=False)
        return tokenizer

    def end_ids(self) -> list[int]:
        """The ids that end a reply of this model's `generate`. Its tokenizer may know only one of them."""
        self._go_offline_without_hub()
        from transformers.utils.hub import cached_file

        if_absent: dict[str, Any] = {f"_raise_exceptions_for_{why}": False for why in ABSENT}
        for name in ("generation_config.json", "config.json"):
            if (file := cached_file(self.path, name, **if_absent)) is not None:
                ends = json_file(Path(file)).get("eos_token_id")
                return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
        return []

    def model(
        self, dtype: str = "auto", attn: str = "auto", device: str | None = None, base_bits: int | None = None
    ) -> PreTrainedModel:
        """Load the weights in evaluation mode. `auto`: SDPA attention (plain attention for models that have no other),
        bfloat16 on a GPU, float32 on a CPU.

        `base_bits`: 4 stores linear layers in 4 bits, as the frozen base of adapters.
        """
        self._go_offline_without_hub()
        with self._reading("model {} could not be loaded"):
            import torch
            from transformers import AutoModelForCausalLM

            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            auto: Any = AutoModelForCausalLM
            with _quietly():
                model, found = auto.from_pretrained(
                    self.path,
                    dtype=torch_dtype(dtype, device),
                    attn_implementation=None if attn == "auto" else attn,
                    trust_remote_code=False,
                    **NAME_GAPS,
                )
            self._refuse_gaps(found)
            if (folder := self.folder()) is not None:
                json_file(folder / "generation_config.json")  # transformers would leave out a broken one
                for part in sorted(OTHER_SENSES & json_file(folder / "config.json").keys()):
                    if not hasattr(model.config, part):
                        _warn_text_alone(self.name, part)
        untyped: Any = model
        _forget_quantization(untyped)
        if base_bits is not None:
            from ajet.engine.quantization import quantise

            quantise(untyped, device)
        untyped.to(device).eval()
        loaded: PreTrainedModel = model
        return loaded

    def config(self) -> Any:
        """The model's configuration, as transformers reads it."""
        self._go_offline_without_hub()
        return self._config()

    def _config(self, **options: Any) -> Any:
        with self._reading(CONFIG_UNREADABLE):
            import transformers

            return transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False, **options)

    def on_meta(self, dtype: str, device: str) -> PreTrainedModel | None:
        """The model without its weights, on PyTorch's `meta` device, as it would be loaded on `device`.

        From its config.json, if that is at hand: in the folder, in the hub's cache, or as a well-known shape. Nothing
        is downloaded. None if its config isn't known.
        """
        with LOADING:
            import torch
            import transformers

            try:
                found: Any = self._config(local_files_only=True)
            except ConfigError:
                if Path(self.path).is_dir():
                    raise
                shape = known_shapes().get(self.path)
                if shape is None:
                    return None
                found = transformers.AutoConfig.for_model(**shape)
            with self._reading("model {} can't be built"), torch.device("meta"):
                # every model has plain attention; a plan replaces it anyway
                model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    found, dtype=torch_dtype(dtype, device), attn_implementation="eager"
                )
        untyped: Any = model
        untyped.eval()
        return model

    def check_weights(self, model: PreTrainedModel) -> None:
        """Raise a `ConfigError` if a local folder's weights aren't those of `model`, which is `on_meta`: only their
        names and shapes are read. Quantized ones have others, which only loading tells."""
        folder, kind = Path(self.path), cast(Any, type(model))
        if not folder.is_dir() or getattr(model.config, "quantization_config", None):
            return
        with self._reading("the weights of model {} can't be read"), _quietly():
            from transformers.modeling_utils import load_state_dict

            state: dict[str, torch.Tensor] = {}
            for file in _weight_files(folder):
                state |= load_state_dict(str(file), map_location="meta")
            options: dict[str, Any] = {"config": model.config, "dtype": model.dtype, "device_map": "meta", **NAME_GAPS}
            _, found = kind.from_pretrained(None, state_dict=state, attn_implementation="eager", **options)
            self._refuse_gaps(found)

    def _refuse_gaps(self, found: Mapping[str, Any]) -> None:
        """Raise if weights were drawn at random for want of those that the model has. Tied ones aren't missing."""
        for name, stored, own in sorted(found["mismatched_keys"])[:1]:
            raise ConfigError(
                f"the weights of model {self.name!r} don't fit its config.json: {name} has shape {tuple(stored)}, "
                f"where the config makes it {tuple(own)}"
            )
        missing, others = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
        if missing:
            have = f", and has others that it doesn't ask for: {_few(others)}" if others else ""
            raise ConfigError(
                f"model {self.name!r} lacks weights that its config.json asks for, {len(missing)} in all: "
                f"{_few(missing)}{have}. They would be random: complete the folder, or correct its config.json"
            )
        if others:
            _warn_unused(self.name, len(others), _few(others))

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """transformers uses what a model's files say as it stands: whatever it raises is what is wrong with them."""
        try:
            with LOADING:
                yield
        except AjetError:
            raise
        except Exception as error:
            why = _why(error, self.folder())
            raise ConfigError(f"{what.format(repr(self.name))}: {why}") from error

    def _go_offline_without_hub(self) -> None:
        """Set the hub's library offline if the hub can't be reached: it would retry each file for a minute."""
        if not Path(self.path).is_dir() and not _hub_is_reachable():
            from huggingface_hub import constants

            constants.HF_HUB_OFFLINE = True


def stored_weights(folder: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights in a Hugging Face folder, by their names in this model: a file names each expert's, the model all
    experts' together. Raises a `ValueError` if they are another model's."""
    kind: Any = type(model)
    with LOADING, _quietly():
        loaded, found = kind.from_pretrained(
            folder,
            config=model.config,
            dtype=model.dtype,
            attn_implementation="eager",  # it computes nothing
            **NAME_GAPS,
        )
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, found[f"{what}_keys"])):
            raise ValueError(f"{what}: {', '.join(names[:3])}")
    weights: dict[str, torch.Tensor] = loaded.state_dict()
    return weights


def _forget_quantization(model: Any) -> None:
    """Have a model whose weights were dequantized on reading (gpt-oss from MXFP4, others from FP8) saved as what it is:
    transformers would fail on saving, or write the numbers of now under the names of then."""
    conversions = getattr(model, "_weight_conversions", None) or []
    operations = [operation for each in conversions for operation in getattr(each, "operations", ())]
    if getattr(model, "hf_quantizer", None) is None and any("Dequantize" in type(one).__name__ for one in operations):
        model._weight_conversions = None  # on saving, it then asks for those of the model's class


def json_file(file: Path) -> dict[str, Any]:
    """The object in one of a model's files; an empty one if there is no such file. Raises a `ConfigError`."""
    try:
        found = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {type(found).__name__}")
    return found


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers would read."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if parts := json_file(folder / f"{name}.index.json").get("weight_map"):
            return [folder / part for part in sorted(set(parts.values()))]
    raise ConfigError(f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, whole or in parts")


def _why(error: Exception, folder: Path | None) -> str:
    """What is wrong with a model's files, if this was raised on reading them: the file that is damaged, if one is."""
    from huggingface_hub.errors import StrictDataclassError

    if "trust_remote_code" in str(error):
        return (
            "its files name code of their own (auto_map), which ajet doesn't run: choose a model that transformers "
            "knows, in a version of transformers that knows it"
        )
    for file in sorted(folder.iterdir()) if folder is not None else ():
        if (damage := _damage(file)) is not None:
            return f"{file} {damage}"
    if isinstance(error, StrictDataclassError):  # a value of config.json, which its cause names with the key
        return str(error.__cause__ or error)
    text = str(error)
    if "Unrecognized configuration class" in text:  # then every class that there is
        return f"{text.partition(chr(10))[0]} Choose a causal language model, such as Qwen3 or Llama"
    return text if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: {text}"


def _damage(file: Path) -> str | None:
    """Why a file of a model can't be read at all."""
    from safetensors import SafetensorError, safe_open

    try:
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            return "is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder"
        if file.suffix == ".json":
            json_file(file)
        if file.suffix == ".safetensors":
            safe_open(file, "pt")
        if file.suffix == ".bin" and start.startswith(b"PK") and not is_zipfile(file):
            return "is damaged, or not all there"
    except OSError as error:
        return f"can't be read: {error.strerror}" if file.suffix in WEIGHTS_OR_JSON else None
    except ConfigError as error:
        return str(error).removeprefix(f"{file} ")
    except SafetensorError as error:
        return f"is damaged, or not all there: {error}"
    return None


@cache
def _warn_unused(name: str, count: int, few: str) -> None:
    log.warning("%s has %d weights that its config.json doesn't ask for, which are left out: %s", name, count, few)


@cache
def _warn_text_alone(name: str, part: str) -> None:
    log.warning(
        "%s is loaded for text alone: the weights that its %s is about are left out, and missing in what is saved",
        *(name, part),
    )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


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
    from ajet.engine.tiny_models import MARK

    if json_file(Path(path) / "tokenizer_config.json").get(MARK):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers' progress bars, and its table of weights that aren't there, out of our output. Raises a
    `ValueError` with what the table says of weights that couldn't be put together."""
    from transformers.utils import logging as transformers_logging

    progress: Any = transformers_logging
    shown = progress.is_progress_bar_enabled()
    table, tables = logging.getLogger("transformers.modeling_utils"), []

    def keep(record: logging.LogRecord) -> bool:
        tables.append(record.getMessage())
        return "LOAD REPORT" not in tables[-1]

    progress.disable_progress_bar()
    table.addFilter(keep)
    try:
        yield
    except RuntimeError as error:
        if names := re.findall(r"^(\S.*?) *\| CONVERSION", "\n".join(tables), re.MULTILINE):
            raise ValueError(f"some parts are missing, or have another shape, of {_few(sorted(names))}") from error
        raise
    finally:
        table.removeFilter(keep)
        if shown:
            progress.enable_progress_bar()


def torch_dtype(name: str, device: str) -> torch.dtype:
    """The dtype that `model.dtype` names."""
    import torch

    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    found: torch.dtype = getattr(torch, name)
    return found
