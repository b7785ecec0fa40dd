"""Build images: one at a time for a path, and without a trace if the build fails."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hpc_rl import __version__
from hpc_rl.errors import RunError, UserError
from hpc_rl.images.definition import Builder, ImageSource, build_argv, cause_of_failure, definition_args, space_needed
from hpc_rl.images.runtimes import RUNTIMES, find_program, missing
from hpc_rl.images.sif import check_image, this_architecture
from hpc_rl.images.wheel import pack_wheel
from hpc_rl.software.shipped import shipped
from hpc_rl.system.files import Follower, open_to_append, read_json, write_atomically
from hpc_rl.system.ownership import private_folder
from hpc_rl.system.processes import adopt_orphans, end, end_descendants, shell_code, start
from hpc_rl.system.scratch import local_folder, remove_tree

POLL_S = 0.2
VERSION_TIMEOUT_S = 60


@dataclass(frozen=True)
class ImageBuild:
    """One image to build."""

    source: ImageSource
    out: Path
    sandbox: bool = False
    """An unpacked folder instead of a SIF file."""
    with_project: bool = True
    """Install hpc-rl into the image; otherwise the image is an unchanged copy of the source."""
    build_args: Sequence[str] = ()
    """KEY=VALUE pairs for the definition file."""
    definition: Path | None = None
    """The user's own definition file; None for the shipped one."""
    force: bool = False
    """Replace an existing image."""


def find_builder() -> Builder:
    """Find Apptainer or Singularity on this machine.

    Raises:
        UserError: neither is installed, or it does not start.
    """
    programs = RUNTIMES["auto"].programs
    program = find_program(programs)
    if program is None:
        raise UserError(f"{missing(programs)}: load its module, or ask the cluster's staff to install it")
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise UserError(f"{program} does not start: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{program} --version did not end within {VERSION_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise UserError(f"{program} --version fails: {done.stderr.strip() or done.returncode}")
    return Builder(program, done.stdout.strip())


def make(order: ImageBuild) -> Path:
    """Build the image and return the path of its sidecar, OUT.json.

    The image is built under another name and renamed at the end; a build that fails or is interrupted leaves nothing.

    Raises:
        UserError: something is missing, in use or too small; nothing was started.
        RunError: the build failed; its output has been shown.
    """
    builder = find_builder()
    out = order.out.absolute()
    if not out.parent.is_dir():
        raise UserError(f"--out {order.out}: no folder {out.parent}")
    if out.exists() and not order.force:
        raise UserError(f"{order.out} exists: choose another --out, or use --force to replace it")
    with _lock(out), _workplace() as (work, cache):
        _check_space(order.source, work, out.parent)
        file = order.source.file
        digest = order.source.digest or (file_sha256(file) if file is not None and file.is_file() else None)
        spec, arguments = _specification(order, work, digest)
        partial = out.with_name(f".{out.name}.partial")
        before = _cached_manifests(cache)
        _remove(partial)  # left by a build whose machine went down
        try:
            _run(build_argv(builder, partial, spec, sandbox=order.sandbox, build_args=arguments), work, cache)
            check_image(partial, this_architecture())
            sha256 = None if order.sandbox else file_sha256(partial)
            _remove(out)
            partial.rename(out)
        finally:
            _remove(partial)
        new = _cached_manifests(cache)[len(before) :]
        digest = digest or (new[0] if len(set(new)) == 1 else None)
        return _write_sidecar(order, out, builder, digest, sha256)


def sidecar(image: Path) -> Path:
    """Return the file that records an image's origin."""
    return image.with_name(f"{image.name}.json")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _specification(order: ImageBuild, work: Path, digest: str | None) -> tuple[str, dict[str, str]]:
    """Return the source of the build, a URI or a definition file, and the variables of the definition file."""
    if not order.with_project:
        return order.source.uri, {}
    definition = order.definition or shipped("apptainer") / "hpc-rl.def"
    if not definition.is_file():
        raise UserError(f"--definition {definition}: no such file")
    return str(definition), definition_args(order.source, pack_wheel(work), digest, order.build_args)


def _run(argv: Sequence[str], work: Path, cache: Path) -> None:
    """Run the build to its end and show its output. The build ends together with this process."""
    folders = {"CACHEDIR": cache, "TMPDIR": work}
    environ = {f"{name}_{key}": str(path) for name in ("APPTAINER", "SINGULARITY") for key, path in folders.items()}
    output = Follower(work / "build.log")
    adopt_orphans()
    with output.path.open("wb") as log, _termination_raises():
        child = start(argv, {**os.environ, **environ}, log, new_session=True)
        try:
            while child.poll() is None:
                time.sleep(POLL_S)
                print(output.new_text(), end="", file=sys.stderr, flush=True)
        finally:
            end(child)
            end_descendants()
            print(output.new_text(), end="", file=sys.stderr, flush=True)
    if child.returncode != 0:
        cause = cause_of_failure(output.path.read_text(errors="replace"), work.parent)
        failed = f"{Path(argv[0]).name} build failed with exit code {shell_code(child.returncode)}"
        raise RunError(f"{failed}: {cause}" if cause else failed)


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that both clean up."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Allow one build of a path at a time; the lock file is removed at the end."""
    path = out.with_name(f".{out.name}.lock")
    try:
        lock = open_to_append(path)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except BlockingIOError:
            is_ours = False
        except OSError:  # a file system without locks
            is_ours = True
        if not is_ours:
            raise UserError(f"another build of {out} is running")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _workplace() -> Iterator[tuple[Path, Path]]:
    """Yield (folder of this build, cache) on a local disk; builds on a network file system take hours or fail.

    If another user has taken the name of the folder that stays, this build has no cache.
    """
    base = kept = local_folder(os.environ) / f"{os.getuid()}.hpc-rl-images"
    if not private_folder(kept):
        base = Path(tempfile.mkdtemp(prefix=f"{kept.name}.", dir=kept.parent))
    given = os.environ.get("APPTAINER_CACHEDIR") or os.environ.get("SINGULARITY_CACHEDIR")
    cache = Path(given) if given else base / "cache"
    cache.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=base))
    try:
        yield work, cache
    finally:
        _remove(work if base == kept else base)


def _check_space(source: ImageSource, work: Path, target: Path) -> None:
    needed = space_needed(source)
    if needed is None:
        return
    for folder in (work, target):
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"{folder} has {free:,} bytes free, and building from {source.uri} may take {needed:,}: "
                + ("set TMPDIR to a larger local disk" if folder == work else "choose another --out")
            )


def _cached_manifests(cache: Path) -> list[str]:
    """Return digests of the images in the runtime's cache, oldest first (OCI image layout, index.json)."""
    index = read_json(cache / "cache" / "blob" / "index.json", named=True)
    return [manifest["digest"] for manifest in index.get("manifests", [])]


def _write_sidecar(order: ImageBuild, out: Path, builder: Builder, digest: str | None, sha256: str | None) -> Path:
    facts: Mapping[str, object] = {
        "source": order.source.uri,
        "digest": digest,
        "hpc_rl": __version__ if order.with_project else None,
        "build_args": list(order.build_args),
        "runtime": builder.version,
        "format": "sandbox" if order.sandbox else "sif",
        "architecture": this_architecture(),
        "built": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "sha256": sha256,
    }
    path = sidecar(out)
    write_atomically(path, json.dumps(facts, indent=2) + "\n")
    return path


def _remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
