"""What an image is made of and by which command. Pure, but for asking which files exist."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError

_ARCHIVES = ("docker-archive", "oci-archive")
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")
_ZSTD = "-comp zstd -Xcompression-level 3"
"""Quicker to write and to read than gzip; every Linux that runs these jobs can read it."""
_UNPACKED = 4
"""Bytes of a working folder for a byte of compressed image: unpacked, and packed again."""


@dataclass(frozen=True)
class Source:
    """What an image is made from."""

    bootstrap: str
    """Agent of the runtime: docker, docker-daemon, docker-archive, oci-archive or localimage."""
    location: str
    """Its argument: a name in a registry, or a path."""

    @property
    def uri(self) -> str:
        """As `apptainer build` takes it without a definition file."""
        if self.bootstrap == "localimage":
            return self.location
        return f"{self.bootstrap}:{'//' if self.bootstrap == 'docker' else ''}{self.location}"

    @property
    def file(self) -> Path | None:
        """The file, or folder, that it is; None for what a registry or a daemon has."""
        if self.bootstrap in (*_ARCHIVES, "localimage"):
            # docker-archive:FILE[:TAG]
            return Path(self.location if Path(self.location).exists() else self.location.partition(":")[0])
        return None

    @property
    def digest(self) -> str | None:
        """The digest that a name in a registry is pinned to."""
        found = _DIGEST.search(self.location)
        return found[1] if found else None

    @property
    def is_moving(self) -> bool:
        """Whether the same words may mean another image tomorrow."""
        return self.bootstrap in ("docker", "docker-daemon") and self.digest is None


@dataclass(frozen=True)
class Runtime:
    """The program that builds and runs images."""

    program: str
    version: str
    """As it says itself: `apptainer version 1.4.5`."""

    @property
    def is_apptainer(self) -> bool:
        return "apptainer" in self.version.lower()


def parse_source(text: str) -> Source:
    """`docker://...`, `docker-daemon:...`, `docker-archive:FILE`, `oci-archive:FILE`, a SIF file or an unpacked folder.

    Raises:
        UserError: none of these, a file that does not exist, or credentials in an address.
    """
    _refuse_credentials("--from", text)
    agent, colon, rest = text.partition(":")
    if colon and agent in ("docker", "docker-daemon", *_ARCHIVES):
        location = rest.removeprefix("//") if agent == "docker" else rest
        source = Source(agent, location)
        if not location or (agent == "docker") != rest.startswith("//"):
            raise UserError(f"--from {text}: write docker://NAME:TAG, docker-daemon:NAME:TAG or docker-archive:FILE")
    elif "://" in text or (not Path(text).exists() and not text.endswith(".sif") and "/" not in text):
        raise UserError(
            f"--from {text}: not a docker://NAME, docker-daemon:NAME, docker-archive:FILE, oci-archive:FILE, SIF file "
            "or unpacked folder"
        )
    else:
        source = Source("localimage", text)
    if source.file is not None:
        if not source.file.exists():
            raise UserError(f"--from {text}: no such file or folder")
        return Source(source.bootstrap, source.location.replace(str(source.file), str(source.file.absolute()), 1))
    return source


def build_argv(
    runtime: Runtime,
    out: Path,
    spec: str,
    *,
    sandbox: bool = False,
    build_args: Mapping[str, str] | None = None,
) -> list[str]:
    """The command that writes one image.

    Args:
        spec: a source's URI, or a definition file.
        sandbox: write an unpacked folder instead of a SIF file.
        build_args: values of the definition's variables.
    """
    arguments = [word for key, value in (build_args or {}).items() for word in ("--build-arg", f"{key}={value}")]
    zstd = ["--mksquashfs-args", _ZSTD] if runtime.is_apptainer and not sandbox else []
    return [runtime.program, "build", *(["--sandbox"] if sandbox else zstd), *arguments, str(out), spec]


def definition_args(source: Source, wheel: Path, digest: str | None, more: Sequence[str]) -> dict[str, str]:
    """Variables of hpc-rl.def: where the image comes from, and what the user sets (KEY=VALUE each).

    Raises:
        UserError: one of the user's is no KEY=VALUE, or has credentials in an address.
    """
    found = {
        **{"bootstrap": source.bootstrap, "from": source.location, "wheel": str(wheel)},
        **{"source": source.uri, "digest": digest or "unknown"},
    }
    for word in more:
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"\w+", key):
            raise UserError(f"--build-arg {word!r}: write KEY=VALUE, for example extras=rl")
        _refuse_credentials("--build-arg", value)
        found[key] = value
    return found


def _refuse_credentials(option: str, text: str) -> None:
    """An argument is seen by every user of the machine, and ends up in the image."""
    if re.search(r"//[^/@\s]+:[^/@\s]+@", text):
        raise UserError(
            f"{option} has a password in an address: leave it out, and set APPTAINER_DOCKER_USERNAME and "
            "APPTAINER_DOCKER_PASSWORD, or log in once (apptainer registry login)"
        )


def space_needed(source: Source) -> int | None:
    """Bytes that building takes, as far as files tell; None where only the registry knows."""
    if source.file is None or source.file.is_dir():
        return None
    return source.file.stat().st_size * _UNPACKED


def cause_of_failure(log: str, cache: Path) -> str:
    """What a failed build's output means, and what to do; empty where it is nothing that is known."""
    for pattern, meaning in _CAUSES:
        if re.search(pattern, log, re.IGNORECASE):
            return meaning.format(cache=cache)
    return ""


_CAUSES = (
    (
        "no space left on device|disk quota exceeded",
        "out of space: free some in {cache}, or set TMPDIR to a larger disk",
    ),
    (
        "unauthorized|authentication required|access denied|denied:",
        "the registry wants credentials: set APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD, or log in once "
        "(apptainer registry login, podman login), which writes a file that only you can read",
    ),
    ("manifest unknown|name unknown|repository .* not found", "there is no such name or tag"),
    (
        "no such host|i/o timeout|connection refused|network is unreachable",
        "no answer from the network: build where there is internet, or from docker-archive:FILE (docker save)",
    ),
    (
        "user namespace|fakeroot|/etc/subuid",
        "this machine may let users build no images: ask your site for user namespaces or fakeroot, or build elsewhere",
    ),
    ("exec format error", "the image is for another architecture than this machine's"),
)
"""Pattern in a failed build's output -> what it means, and what to do."""
