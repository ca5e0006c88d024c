"""`module.path->Class` and `path/to/file.py->Class`: how a YAML names a user's own class or function.

`load_symbol` imports it. A file is imported under a package name derived from its folder, so that two files of the same
name don't collide; its neighbours can be imported both as `from .helper import …` and as `from helper import …`. Any
failure is an `ImportPathError` that says what exists instead.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from ajet.schema.errors import ImportPathError, UserError
from ajet.schema.install import TRAIN, TRAIN_PACKAGES, install_command, written_for_another_agentscope

log = logging.getLogger("ajet.user_code")


def find_named(
    name: str | Path, base_dirs: Sequence[str | Path] = (), is_there: Callable[[Path], bool] = Path.exists
) -> Path | None:
    """The absolute path of what `name` refers to, or None. `base_dirs`: the YAML's folder, if there is one."""
    for candidate in (*likely_places(name, base_dirs), *_above(name, base_dirs)):
        if holds(is_there, candidate):
            return candidate.resolve()
    return None


def likely_places(name: str | Path, base_dirs: Sequence[str | Path] = ()) -> list[Path]:
    """The folders that are searched first, and that messages about a missing file name."""
    given = Path(os.path.expanduser(name))
    return list(dict.fromkeys(Path(base).resolve() / given for base in (Path.cwd(), *base_dirs)))


def looked_in(name: str | Path, base_dirs: Sequence[str | Path] = ()) -> str:
    """The folders of `likely_places`, for a message."""
    return " and ".join(dict.fromkeys(str(place.parent) for place in likely_places(name, base_dirs)))


def neighbours(name: str | Path, base_dirs: Sequence[str | Path], is_there: Callable[[Path], bool]) -> list[str]:
    """What there is in the folders of `likely_places`."""
    folders = dict.fromkeys(place.parent for place in likely_places(name, base_dirs))
    present = (entry for folder in folders if holds(Path.is_dir, folder) for entry in sorted(folder.iterdir()))
    return [entry.name for entry in present if holds(is_there, entry)]


def folders_above(base_dirs: Sequence[str | Path]) -> list[Path]:
    """The folders above `base_dirs`, nearest first."""
    return list(dict.fromkeys(folder for base in base_dirs for folder in Path(base).resolve().parents))


def holds(check: Callable[[Path], bool], path: Path) -> bool:
    """`check(path)`, or False if no file can have such a path."""
    try:
        return check(path)
    except (OSError, ValueError):  # too long, a NUL in it, or in a folder that may not be entered
        return False


def _above(name: str | Path, base_dirs: Sequence[str | Path]) -> list[Path]:
    given = Path(os.path.expanduser(name))
    return [] if given.is_absolute() else [folder / given for folder in folders_above(base_dirs)]


ARROW = "->"
PROGRAM = "ajet_program"
"""The module that holds what a running program passed as an object: see `publish`."""
STANDS_FOR = "__ajet_class__"
"""Attribute of an object that stands for a class: a function made a workflow by `@rollout`."""
T = TypeVar("T")


class ImportPath(NamedTuple):
    place: str
    name: str

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py") or "/" in self.place or os.sep in self.place


def split_import_path(text: str) -> ImportPath:
    place, arrow, name = (part.strip() for part in text.partition(ARROW))
    if not (arrow and place and name and all(part.isidentifier() for part in name.split("."))):
        raise ImportPathError(
            f"{text!r} doesn't name a class: write `module.path->Class` or `path/to/file.py->Class`"
            + (f", for example `{text.replace(':', ARROW)}`" if ":" in text and not arrow else "")
            + (" in quotes, or the shell takes what follows `-` as a file to write to" if text.endswith("-") else "")
        )
    return ImportPath(place, name)


def find_file(path: str, base_dirs: Sequence[str | Path] = ()) -> Path:
    """The file of code that `path` refers to. An `ImportPathError` names the files that are there instead."""
    given = Path(os.path.expanduser(path))
    if (found := find_named(path, base_dirs, Path.is_file)) is not None:
        return found
    like_it = [name for name in neighbours(path, base_dirs, Path.is_file) if Path(name).suffix == given.suffix]
    raise ImportPathError(f"no file {given.name!r} in {looked_in(path, base_dirs)}" + _instead(given.name, like_it))


def load_symbol(text: str, base_dirs: Sequence[str | Path] = (), *, expects: type | None = None) -> Any:
    """Import what `text` names. With `expects`, it must be a subclass of that class."""
    place, name = path = split_import_path(text)
    module = _load_file(find_file(place, base_dirs)) if path.is_file else _load_module(place, base_dirs)
    symbol: Any = module
    for part in name.split("."):
        if not hasattr(symbol, part):
            raise ImportPathError(f"{place} has no {name!r}" + _instead(part, _names_in(module, expects)))
        symbol = getattr(symbol, part)
    if expects is not None:
        symbol = getattr(symbol, STANDS_FOR, symbol)
    if expects is not None and not (isinstance(symbol, type) and issubclass(symbol, expects)):
        others = [other for other in _names_in(module, expects) if other != name]
        raise ImportPathError(f"{text} isn't a class derived from {expects.__name__}" + _instead(name, others))
    return symbol


_now = threading.local()


def importing() -> bool:
    """Whether this thread is currently importing a user's module for a run."""
    return getattr(_now, "importing", False)


def publish(symbol: Any, unnamed: str = "agent") -> str:
    """Make an object of the running program importable in this process; returns `ajet_program->name`. `unnamed`: the
    name for an object without one."""
    module = sys.modules.setdefault(PROGRAM, ModuleType(PROGRAM))
    name = getattr(symbol, "__name__", "")
    name = name if name.isidentifier() else unnamed  # `<lambda>`
    me = threading.current_thread()
    with _path:
        while _publishers.get(name, me) is not me and _publishers[name].is_alive() and vars(module)[name] is not symbol:
            name += "_"  # a run in that thread may still use it
        vars(module)[name], _publishers[name] = symbol, me
    return f"{PROGRAM}{ARROW}{name}"


_publishers: dict[str, threading.Thread] = {}


def import_class(text: str, base: type[T], *, key: str, base_dirs: Sequence[str | Path] = ()) -> type[T]:
    """The class that `text` names. Errors name `key`, the YAML key that `text` comes from."""
    try:
        found: type[T] = load_symbol(text, base_dirs, expects=base)
    except ImportPathError as error:
        raise ImportPathError(f"{key}: {error}") from error
    return found


def check_method(found: type, base: type, signature: str, key: str) -> None:
    """Raise `ImportPathError` unless a class has its own method with this name, and it takes these arguments."""
    name, *given = re.findall(r"\w+(?=[(,)])", signature)
    method = getattr(found, name)
    if method is getattr(base, name):
        own = [other for other, value in vars(found).items() if inspect.isfunction(value)]
        has = f" (it has {', '.join(own)})" if own else ""
        raise ImportPathError(f"{key}: {found.__name__} has no `{name}`{has}\n    define `{signature}`")
    try:
        inspect.signature(method).bind(*given)
    except TypeError:
        code = getattr(inspect.unwrap(method), "__code__", None)
        where = f" (line {code.co_firstlineno})" if code is not None else ""
        taken = ", ".join(inspect.signature(method).parameters)
        raise ImportPathError(
            f"{key}: {found.__name__}.{name}{where} takes ({taken}), and is called with ({', '.join(given)})\n"
            f"    define `{signature}`"
        ) from None


def built(found: type[T], key: str, given: str, *arguments: Any) -> T:
    """An object of a user's class. Raises `ImportPathError` if it lacks a method or takes other arguments than `given`
    says."""
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ImportPathError(f"{key}: {found.__name__} has no `{missing[0]}`: define it")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise ImportPathError(
            f"{key}: the run makes a {found.__name__}({given}), which fails: {error}\n"
            f"    write `def __init__(self, {given})` and `super().__init__({given})` in it"
        ) from None
    return found(*arguments)


def _instead(wanted: str, present: Sequence[str]) -> str:
    """`; did you mean …` or `; there is …`."""
    near = get_close_matches(wanted, present, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not present:
        return ""
    return f"; there is: {', '.join(list(present)[:8])}" + (" …" if len(present) > 8 else "")


def _names_in(module: ModuleType, expects: type | None) -> list[str]:
    """Names in a module that could have been meant: fitting classes, or else its own public names."""
    public = {name: value for name, value in list(vars(module).items()) if not name.startswith("_")}
    if expects is not None:
        classes = {name: value for name, value in public.items() if isinstance(value, type) and value is not expects}
        if fitting := [name for name, value in classes.items() if issubclass(value, expects)]:
            return fitting
    return [name for name, value in public.items() if getattr(value, "__module__", None) == module.__name__]


PACKAGE = "ajet_user_"
"""How the package begins as which a file's folder is imported. So files beside it can be imported relatively, too."""
OUTSIDE_FOLDER = "attempted relative import beyond top-level package"


def _unique_name(file: Path) -> str:
    return f"{PACKAGE}{hashlib.sha256(os.fsencode(file.parent)).hexdigest()[:12]}.{file.stem.replace('.', '_')}"


def forget_files() -> None:
    """A program may run for days: its next run imports the files that it names as they are by then."""
    for name, module in sys.modules.copy().items():  # in one piece: other threads import meanwhile
        if name.startswith(PACKAGE) and "." in name and module.__name__ == name:  # else `stands_for`
            sys.modules.pop(name, None)
            package, _, last = name.rpartition(".")
            vars(sys.modules.get(package, module)).pop(last, None)  # `from . import helper` looks there first


def stands_for(file: Path, module: ModuleType) -> None:
    """Let `file` name the module that the program has imported from it, with what the program has set there."""
    sys.modules[_unique_name(file)] = module


class _UserFile(SourceFileLoader):
    """Runs a user's file with its folder first on `sys.path`."""

    def exec_module(self, module: ModuleType) -> None:
        with _first_on_path(Path(self.path).parent), _errors_named(self.path):
            super().exec_module(module)


class _UserFiles:
    """Finds each user's file under its unique name, so that Python imports it like any module: once, while other
    threads wait."""

    def __init__(self) -> None:
        self.known: dict[str, Path] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if (file := self.known.get(name)) is None:
            return None
        return spec_from_file_location(name, file, loader=_UserFile(name, str(file)))


_files = _UserFiles()
sys.meta_path.insert(0, _files)


def _load_file(file: Path) -> ModuleType:
    """Import a file under a unique name."""
    if file.suffix != ".py":
        raise ImportPathError(f"{file} can't be imported: it isn't a Python file")
    name = _unique_name(file)
    package = name.partition(".")[0]
    if package not in sys.modules:
        folder = ModuleType(package)
        folder.__path__ = [str(file.parent)]
        sys.modules[package] = folder
    _files.known[name] = file
    __import__(name)  # of files that import each other in two threads, `import_module` would raise a deadlock
    while name not in sys.modules:  # another thread's import has failed: this one says why
        __import__(name)
    return sys.modules[name]


def _load_module(name: str, base_dirs: Sequence[str | Path]) -> ModuleType:
    """Import a module by its dotted name, also from the working directory, `base_dirs` and the folders above."""
    folders = [Path.cwd(), *(Path(base).resolve() for base in base_dirs)]
    home = _home_of_module(name, [*folders, *folders_above(base_dirs)])
    if home is None:
        home = _home_of_module(name.partition(".")[0], folders)
    for folder in folders:
        _last_on_path(folder)
    with _first_on_path(home), _errors_named(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if name == missing or name.startswith(missing + "."):
                raise ImportPathError(f"there is no module {missing!r}" + _neighbours(missing, folders)) from None
            raise


def _home_of_module(name: str, folders: Sequence[Path]) -> Path | None:
    for folder in folders:
        place = folder.joinpath(*name.split("."))
        if place.is_dir() or place.with_name(f"{place.name}.py").is_file():
            return folder
    return None


def _neighbours(missing: str, folders: Sequence[Path]) -> str:
    """The modules that exist where `missing` was looked up."""
    parent, _, last = missing.rpartition(".")
    if parent and (package := sys.modules.get(parent)):
        places = [Path(place) for place in getattr(package, "__path__", [])]
    else:
        places = list(folders)
    found = [
        entry.stem
        for place in places
        if place.is_dir()
        for entry in sorted(place.iterdir())
        if (entry.suffix == ".py" or (entry.is_dir() and any(entry.glob("*.py")))) and entry.stem.isidentifier()
    ]
    return _instead(last or missing, list(dict.fromkeys(found)))


@contextmanager
def _errors_named(place: str) -> Iterator[None]:
    """Turn any exception from a user's module during import into an error that names the line. The run's relative
    paths hold afterwards: a module that changes the working directory has it put back."""
    importing_before = importing()
    _now.importing = True
    with _path:
        _imported_from.append(_imported_from[0] if _imported_from else _working_directory())
    try:
        yield
    except ImportPathError:
        raise
    except UserError as error:
        raise ImportPathError(f"importing {place}: {error}") from error
    except SyntaxError as error:
        if error.filename is None:  # bytes that are no text
            raise ImportPathError(f"{place}: {error.msg}: save it as UTF-8") from error
        raise ImportPathError(f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    # a user's module may raise anything during its import, even call `sys.exit()`
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == place]
        where = own or [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
        at = f"{where[-1].filename}:{where[-1].lineno}: " if where else ""
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            if error.name.startswith(PACKAGE):
                missing = error.name.partition(".")[2].replace(".", "/")
                raise ImportPathError(f"{at}a relative import found no {missing}.py next to the file") from error
            hint = _missing_module(error.name)
        if other := written_for_another_agentscope(error):
            hint = f"; {other}"
        if OUTSIDE_FOLDER in str(error):
            hint = "; write an absolute import: modules in the file's folder, in the config's and here are found"
        said = str(error).partition("\n\nFor further information")[0]  # Pydantic's link
        raise ImportPathError(f"{at}importing {place} failed with {type(error).__name__}: {said}{hint}") from error
    finally:
        _now.importing = importing_before
        with _path:
            folder, moved_to = _imported_from.pop(), _working_directory()
            if folder and folder != moved_to and not _imported_from:
                os.chdir(folder)
                log.warning("importing %s changed the working directory to %s: it is put back", place, moved_to)


_imported_from: list[str | None] = []
"""The working directory before the imports that go on, once for each: the last to end puts it back."""


def _working_directory() -> str | None:
    """None: it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _missing_module(name: str) -> str:
    """Advice about a missing module that a user's file imports."""
    top = name.partition(".")[0]
    if top in TRAIN_PACKAGES:
        return f"; {install_command(TRAIN)}"
    if top != "ajet":
        return f"; install it, or put {top}.py next to the file"
    return f"; this version has no {name}: docs/from_agentjet.md lists the names of older files and what replaces them"


@contextmanager
def _first_on_path(folder: Path | None) -> Iterator[None]:
    """Put `folder` first on `sys.path` during an import, and last afterwards (for imports inside functions).

    Modules that were imported earlier from another user's folder under a name that `folder` has too are forgotten, so
    that a second project gets its own `helper.py`.
    """
    if folder is None:
        yield
        return
    _last_on_path(folder)
    own = {entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or entry.is_dir()}
    giving_way = {top for top in own if (home := _home_of(top)) != folder and home in _FOLDERS}
    # list: another thread may be importing meanwhile
    for name in [name for name in list(sys.modules) if name.partition(".")[0] in giving_way]:
        sys.modules.pop(name, None)
    # A new list each time: another thread may be searching the old one for an import, and must not skip an entry.
    with _path:
        sys.path = [str(folder), *sys.path]
    try:
        yield
    finally:
        with _path:
            without = list(sys.path)
            without.remove(str(folder))
            sys.path = without


_path = threading.Lock()
"""Held while `sys.path` or what a program publishes is changed, never during an import."""
_FOLDERS: set[Path] = set()
"""Folders of the users' files imported so far."""


def _home_of(top: str) -> Path | None:
    """The folder from which a top-level module was imported."""
    origin = getattr(sys.modules.get(top), "__file__", None)
    if origin is None:
        return None
    file = Path(origin)
    return file.parent.parent if file.name == "__init__.py" else file.parent


def _last_on_path(folder: Path) -> None:
    _FOLDERS.add(folder)
    with _path:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
