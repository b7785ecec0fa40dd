"""The process in which scenarios run: the guard has to be loaded before torch, and the rest of the tests has no GPU."""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
import torch

P = ParamSpec("P")
T = TypeVar("T")

_OLDEST_TORCH = (2, 13)
"""The simulation replaces private parts of torch, which earlier versions do not have in this form."""

_executors: dict[str, ProcessPoolExecutor] = {}


def simulate(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a process in which torch accepts tensors on device `cuda`; return its result.

    The process is kept for later calls, because importing torch and transformers takes seconds.

    Args:
        function: a module's function. Arguments, result and exceptions are pickled.
    """
    return call_in("scenarios", function, *args, **kwargs)


def call_in(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in the process of this name; see `simulate`."""
    if name not in _executors:
        _require_tools()
        _executors[name] = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        atexit.register(_executors[name].shutdown)
    with _preloaded(compiled("guard.cpp")):  # the pool starts its process at the first call
        future = _executors[name].submit(_call, function, args, kwargs)
    try:
        return future.result()
    except BaseException:
        # A process that was interrupted, or that failed inside of the simulation, is not used again.
        executor = _executors.pop(name)
        atexit.unregister(executor.shutdown)
        for process in list((executor._processes or {}).values()):
            process.kill()
        executor.shutdown()
        raise


def _call(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        # Torch's own errors may hold objects that cannot be pickled.
        raise RuntimeError("".join(traceback.format_exception(error))) from None


def _require_tools() -> None:
    """Skip the test if this environment cannot simulate a GPU."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        pytest.skip(f"torch {torch.__version__}: GPUs are simulated with torch {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]}")
    if torch.version.cuda is not None:
        pytest.skip(f"torch {torch.__version__} is a build for CUDA: GPUs are simulated on a build for CPUs")
    if shutil.which(_compiler()) is None:
        pytest.skip(f"no C++ compiler {_compiler()}: the simulation compiles a small library")


def _compiler() -> str:
    from torch.utils.cpp_extension import get_cxx_compiler

    compiler: str = get_cxx_compiler()
    return compiler


def compiled(name: str) -> Path:
    """Return a library from a file of this folder. The first call compiles it, which takes some 10 s."""
    from torch.utils.cpp_extension import include_paths, library_paths

    source = Path(__file__).with_name(name)
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    library = Path(tempfile.gettempdir()) / f"simulated-gpu-{os.getuid()}-{key}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        words = [_compiler(), "-std=c++20", "-shared", "-fPIC", "-O1", str(source), "-o", str(partial)]
        words += [f"-I{path}" for path in include_paths("cpu")]
        words += [f"-L{path}" for path in library_paths("cpu")]
        subprocess.run([*words, "-ltorch_cpu", "-lc10"], check=True, timeout=600)
        partial.replace(library)
    return library


@contextmanager
def _preloaded(library: Path) -> Iterator[None]:
    """Let processes that start now load the library before everything else."""
    from torch.utils.cpp_extension import library_paths

    wanted: dict[str, str] = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": os.pathsep.join(library_paths("cpu")),
    }
    before: dict[str, Any] = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
