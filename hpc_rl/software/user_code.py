"""The user's code by name, `package.module:NAME` or `path/file.py:NAME`: find it, read its names, and import it.

All functions but the last import nothing, so that a login node can check a name before it queues the job.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from hpc_rl.errors import UserError
from hpc_rl.software.installation import install_command
from hpc_rl.system.ownership import refuse_foreign

_files: list[Path] = []
"""The files that this process has imported. Their folders are where `import` finds other modules."""


@dataclass(frozen=True)
class Location:
    """Where a name is defined: in a file, or else in a module."""

    name: str
    file: Path | None = None
    module: str = ""


def read_location(spec: str) -> Location | None:
    """Read `package.module:NAME` or `path/file.py:NAME`. Return None if the text has another form."""
    where, _, name = spec.rpartition(":")
    if where.endswith(".py") or "/" in where:
        return Location(name, file=Path(where).expanduser()) if name.isidentifier() else None
    valid = bool(where) and all(part.isidentifier() for part in [name, *where.split(".")])
    return Location(name, module=where) if valid else None


def find_source(option: str, location: Location, same_python: bool) -> Path | None:
    """Return the source file, or None if it is not available here.

    Args:
        option: the option and its value, for the error.
        same_python: whether a module that is not found here is missing where the code will run, too.

    Raises:
        UserError: there is no such file or module.
    """
    if location.file is None:
        _refuse_shadowed(option, location)
        missing, source = _find(location.module)
        if missing and same_python:
            raise UserError(f"{option}: found no module {missing!r} in {Path.cwd()} or among the installed packages")
        if source is not None and source.is_relative_to(Path.cwd()):
            refuse_foreign(f"{option}: {source}", source)
        return source
    if not location.file.is_file():
        raise UserError(f"{option}: no such file: {location.file}{_near_file(location.file)}")
    if not location.file.is_absolute():
        refuse_foreign(f"{option}: {location.file}", location.file)
    return location.file


def find_statement(option: str, source: Path, name: str) -> ast.stmt | None:
    """Return the statement of a source file that binds a name, or None if a wildcard import may bind it.

    Raises:
        UserError: the file cannot be read as Python, or does not have the name; the message suggests another one.
    """
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        at = f", line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f": {error}"
        raise UserError(f"{option}: {source} cannot be read as Python{at}") from error
    names = dict(_bindings(tree.body))
    if name not in names and "*" not in names:
        close = difflib.get_close_matches(name, names, n=1)
        defined = [known for known, node in names.items() if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(defined) or 'no function'}"
        raise UserError(f"{option}: no {name!r} in {source}; {hint}")
    return names.get(name)


def imported_packages(source: Path) -> list[str]:
    """Return the packages that a source file imports whenever it is loaded, itself or by the files beside it.

    Imports in functions, conditions and `try` may never happen. A file that changes sys.path may import anything.
    """
    found: dict[str, None] = {}
    files = [source]
    for file in files:  # grows
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
            body = ast.parse(text).body
        except (SyntaxError, ValueError, OSError):
            return []
        if "sys.path" in text:
            return []
        for name in _imported(body):
            beside = [folder / name for folder in (source.parent, Path.cwd())]
            own = next((path.with_suffix(".py") for path in beside if path.with_suffix(".py").is_file()), None)
            if own is not None and own not in files:
                files.append(own)
            elif own is None and not any(path.is_dir() for path in beside) and name not in sys.stdlib_module_names:
                found[name] = None
    return list(found)


def _imported(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the top-level names of the modules that statements import."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def literal_kind(statement: ast.stmt) -> str | None:
    """Describe the value of an assignment if it is a literal, which cannot be called."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Constant):
        return {str: "text", bool: "a boolean", type(None): "None"}.get(type(value.value), "a number")
    kinds = {
        ast.Dict: "a dictionary",
        ast.List: "a list",
        ast.Tuple: "a tuple",
        ast.Set: "a set",
        ast.JoinedStr: "text",
    }
    return kinds.get(type(value))


def import_module(option: str, location: Location, prefix: str) -> ModuleType:
    """Import the module or file of a location.

    Args:
        option: the option and its value, for the error.
        prefix: beginning of the name under which a file is imported, so that math.py does not replace Python's module.

    Raises:
        UserError: the module cannot be imported.
    """
    try:
        if location.file is not None:
            return _import_file(location.file, prefix)
        return importlib.import_module(location.module)
    except ModuleNotFoundError as error:
        hint = f": {install_command('rl')}" if location.module.startswith("hpc_rl.") else ""
        raise UserError(f"{option} needs {error.name}, which is not installed{hint}") from error
    except UserError:
        raise
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"{option}: importing it raised {type(error).__name__}: {error}") from error


def _import_file(path: Path, prefix: str) -> ModuleType:
    name = f"{prefix}_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    if path.resolve() not in _files:
        _refuse_ambiguous(path.resolve())
        _files.append(path.resolve())
        sys.path.append(str(path.resolve().parent))
    found.loader.exec_module(module)
    return module


def _refuse_ambiguous(path: Path) -> None:
    """Refuse a file beside which there is a module of the same name as beside another function's file: all functions
    would import one of them."""
    for other in _files:
        both = {file.name for file in path.parent.glob("*.py")} & {file.name for file in other.parent.glob("*.py")}
        names = sorted(both - {"__init__.py"} - ({path.name} & {other.name}))  # functions are loaded by their paths
        if names and path.parent != other.parent:
            raise UserError(
                f"{path.with_name(names[0])} has the name of {other.with_name(names[0])}, which the code in that "
                "folder may import in the same process: rename one of them, or put both files into one folder"
            )


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a module's statements bind, each with its statement; "*" for a wildcard import."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id, node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for _, block in ast.iter_fields(node):
                if isinstance(block, list):
                    inner = [part.body if isinstance(part, ast.ExceptHandler) else [part] for part in block]
                    yield from _bindings([stmt for part in inner for stmt in part if isinstance(stmt, ast.stmt)])


def _find(module: str) -> tuple[str | None, Path | None]:
    """Find a module's source without importing its packages.

    Returns:
        the part of its name that is missing (None if none is), and its source file (None if it is unknown).
    """
    missing, found = _resolved(module, _folders())
    origin = None if found is None else found.origin
    return missing, Path(origin) if origin is not None and origin.endswith(".py") else None


def _folders() -> list[str]:
    """Return where the job looks for modules: the working folder is the last one; see `look_last`."""
    here = Path.cwd()
    is_first = not sys.flags.safe_path and bool(sys.path) and sys.path[0] in ("", str(here))
    return [*filter(None, sys.path[is_first:]), str(here)]


def _resolved(module: str, folders: Sequence[str], hooks: bool = True) -> tuple[str | None, ModuleSpec | None]:
    """Find a module as `import` does, so that a folder without __init__.py gives way to any other module of its name.

    Args:
        hooks: whether to ask import hooks too: an editable installation may have no other way.

    Returns:
        the part of its name that is missing (None if none is), and what was found.
    """
    search, parts = folders, module.split(".")
    found = None
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        found = (_top_level if hooks and count == 1 else PathFinder.find_spec)(parts[count - 1], search)
        if found is None:
            return name, None
        if found.submodule_search_locations is None and count < len(parts):
            return ".".join(parts[: count + 1]), None
        search = list(found.submodule_search_locations or ())
    return None, found


def _top_level(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Find a module by the finders of `import`, in their order."""
    found = (finder.find_spec(name, folders if finder is PathFinder else None) for finder in sys.meta_path)
    return next(filter(None, found), None)


def _refuse_shadowed(option: str, location: Location) -> None:
    """Refuse a module of the working folder if `import` finds another one of its name first, or does not reach it."""
    _, own = _resolved(location.module, [str(Path.cwd().resolve())], hooks=False)
    if own is None:
        return
    _, first = _resolved(location.module, _folders())
    if first is None or _place(first) != _place(own):
        name = location.module.partition(".")[0]
        other = _top_level(name, _folders())
        whose = "a module of Python" if name in sys.stdlib_module_names or other is None else str(_place(other))
        raise UserError(
            f"{option}: {_place(own)} has the name of {whose}, which is imported instead: rename it, or name your "
            f"file, as in path/{location.module.rpartition('.')[2]}.py:{location.name}"
        )


def _place(found: ModuleSpec) -> Path:
    """Return the file of a module, or the folder of a package."""
    folders = list(found.submodule_search_locations or ())
    return Path(folders[0] if folders else str(found.origin)).resolve()


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""
