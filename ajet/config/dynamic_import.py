"""From `module.path->Class` or `path/file.py->Class` in a YAML file to the class. Errors say what exists instead.

A file is loaded under a name of its own folder's, so that two files called `agent.py` do not collide and
`from .tools import x` finds its neighbour; `import tools` does too. Loading one file twice gives the same class.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ajet.schema.errors import ImportPathError

ARROW = "->"
T = TypeVar("T")


def import_class(spec: str, base: type[T], *, key: str, folders: Iterable[Path] = ()) -> type[T]:
    """The class that `spec` names.

    `key` is where the spec was written, for messages. Relative files are looked for in the working directory, then in
    `folders` (the YAML file's own). Raises `ImportPathError`.
    """
    where, arrow, name = (part.strip() for part in spec.partition(ARROW))
    if not (where and arrow and name):
        raise ImportPathError(f"{key}: {spec!r} should be 'module.path->Class' or 'path/file.py->Class'")
    if where.endswith(".py") or "/" in where:
        module = _load_file(_find_file(where, key, folders), key)
    else:
        module = _load_module(where, key)
    found = getattr(module, name, None)
    if found is None:
        raise ImportPathError(f"{key}: no class {name!r} in {where}. {_offer(name, _classes(module, base))}")
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ImportPathError(
            f"{key}: {name!r} in {where} is {_kind(found)}, not a subclass of {base.__module__}.{base.__qualname__}. "
            f"{_offer(name, _classes(module, base))}"
        )
    return found


def source_file(cls: type[Any]) -> Path | None:
    """The file a class was written in; None for one made at run time."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return Path(file) if file else None


def _find_file(where: str, key: str, folders: Iterable[Path]) -> Path:
    path = Path(where).expanduser()
    tried = [path] if path.is_absolute() else [folder / path for folder in (Path.cwd(), *folders)]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    present = sorted({file.name for candidate in tried for file in candidate.parent.glob("*.py")})
    places = ", ".join(str(candidate) for candidate in dict.fromkeys(tried))
    raise ImportPathError(f"{key}: no such file: {places}. {_offer(path.name, present, 'file')}")


def _load_file(path: Path, key: str) -> ModuleType:
    digest = hashlib.sha256(str(path.parent).encode()).hexdigest()[:10]
    package = f"_ajet_user_{digest}"
    name = f"{package}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if package not in sys.modules:
        parent = ModuleType(package)
        parent.__path__ = [str(path.parent)]
        parent.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
        sys.modules[package] = parent
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    _working_directory_first()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise _broken_import(f"{key}: {path} can't be imported", error) from error
    return module


def _load_module(name: str, key: str) -> ModuleType:
    _working_directory_first()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _broken_import(f"{key}: module {name!r} can't be imported", error) from error
        raise ImportPathError(
            f"{key}: no module {error.name!r}. {_offer(error.name, _siblings(error.name))}"
        ) from error
    except ImportPathError:
        raise
    except Exception as error:  # user code may raise anything while it is imported
        raise _broken_import(f"{key}: module {name!r} can't be imported", error) from error


def _working_directory_first() -> None:
    """As `python -m` does: a project's own modules are found from where the command is run."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _broken_import(intro: str, error: Exception) -> ImportPathError:
    text = f"{intro}: {type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    if own:
        text += f" (raised at {own[-1].filename}:{own[-1].lineno})"
    return ImportPathError(text)


def _siblings(missing: str) -> list[str]:
    """Importable names beside a missing module."""
    package, _, _ = missing.rpartition(".")
    roots = list(getattr(sys.modules.get(package), "__path__", [])) if package else [str(Path.cwd())]
    names = set()
    for root in map(Path, roots):
        if root.is_dir():
            names |= {path.stem for path in root.glob("*.py") if path.stem.isidentifier()}
            names |= {path.name for path in root.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    return sorted(f"{package}.{name}" if package else name for name in names - {"__init__"})


def _classes(module: ModuleType, base: type[Any]) -> list[str]:
    classes = inspect.getmembers(module, inspect.isclass)
    return [name for name, cls in classes if issubclass(cls, base) and cls is not base]


def _kind(thing: Any) -> str:
    return "a class" if inspect.isclass(thing) else f"a {type(thing).__name__}"


def _offer(wanted: str, present: list[str], noun: str = "name") -> str:
    if not present:
        return f"There is no fitting {noun} there."
    close = get_close_matches(wanted, present, n=1, cutoff=0.5)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(present[:12]) + (", …" if len(present) > 12 else "")
    return f"{meant}Present: {shown}."
