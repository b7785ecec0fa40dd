"""What torch may unpickle: descriptions of checkpoints, and nothing that runs a program.

torch's collectives of objects are pickles, and so is the description of a checkpoint (`.metadata`). hpc-rl's own
exchanges are tensors and JSON, but torch.distributed.checkpoint plans with such collectives. A pickle may call any
function that Python can import, so the classes in it are limited to those that a description, a plan, its result or its
error consists of. This holds for this user's checkpoints too: they may have been copied, or unpacked from an archive.
"""

from __future__ import annotations

import builtins
import enum
import pathlib
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from types import ModuleType
from typing import IO, Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from torch.distributed.checkpoint.api import CheckpointException

from hpc_rl import errors


class PlainUnpickler(pickle.Unpickler):
    """Admits the data types of checkpoint plans, torch's types of numbers, and errors of Python, torch and hpc-rl."""

    def find_class(self, module: str, name: str) -> Any:
        found = _admitted().get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it contains an object of {module}.{name}, which hpc-rl does not admit")
        return found


def load(file: IO[bytes]) -> Any:
    """Read a pickle from a file.

    Raises:
        UnpicklingError: it is damaged, or contains more than PlainUnpickler admits.
    """
    try:
        return PlainUnpickler(file).load()
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error


def require() -> None:
    """Let torch's collectives of objects in this process use PlainUnpickler.

    Raises:
        RuntimeError: this version of torch unpickles in another place.
    """
    if not hasattr(distributed_c10d, "_unpickler"):
        raise RuntimeError(f"hpc-rl does not know how torch {torch.__version__} unpickles the objects of other ranks")
    distributed_c10d._unpickler = PlainUnpickler  # type: ignore[misc, assignment]


@cache
def _admitted() -> dict[tuple[str, str], Any]:
    """Return (module, name) -> object of everything that a pickle may name."""
    named = [torch.serialization._get_layout, CheckpointException, traceback.StackSummary, traceback.FrameSummary]
    found: dict[tuple[str, str], Any] = {(one.__module__, one.__name__): one for one in named}
    found |= {
        ("torch", "Size"): torch.Size,
        (pathlib.PosixPath.__module__, "PosixPath"): pathlib.PosixPath,
        ("builtins", "set"): set,
        ("builtins", "getattr"): _member,
    }
    found |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    for module in (builtins, pickle, torch, torch.distributed, errors):
        found |= {(module.__name__, name): kind for name, kind in _types(module) if issubclass(kind, Exception)}
    for module in (filesystem, metadata, planner, storage):
        found |= {
            (module.__name__, name): kind
            for name, kind in _types(module)
            if is_dataclass(kind) or issubclass(kind, enum.Enum | Exception)
        }
    return found


def _member(kind: Any, name: Any) -> enum.Enum:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of getattr."""
    if not isinstance(kind, enum.EnumType) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it takes {name!r} of {kind!r}, which hpc-rl does not admit")
    return kind.__members__[name]


def _types(module: ModuleType) -> Iterator[tuple[str, type]]:
    # isinstance would also read __class__ of the value, and some values of torch then warn that they are deprecated.
    return ((name, value) for name, value in vars(module).items() if issubclass(type(value), type))
