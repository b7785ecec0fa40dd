"""The source of an image, and the command that builds it. Pure, except that it checks which files exist."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError

_ARCHIVES = ("docker-archive", "oci-archive")
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")
_ZSTD = "-comp zstd -Xcompression-level 3"
"""Faster to write and to read than gzip; every Linux that runs these jobs can read it."""
_UNPACKED = 4
"""Bytes in the working folder per byte of a compressed image, which is unpacked and packed again."""


@dataclass(frozen=True)
class ImageSource:
    """The source that an image is built from."""

    bootstrap: str
    """Bootstrap agent of Apptainer: docker, docker-daemon, docker-archive, oci-archive or localimage."""
    location: str
    """Argument of the agent: a name in a registry, or a path."""

    @property
    def uri(self) -> str:
        """Return the source as `apptainer build` accepts it without a definition file."""
        if self.bootstrap == "localimage":
            return self.location
        return f"{self.bootstrap}:{'//' if self.bootstrap == 'docker' else ''}{self.location}"

    @property
    def file(self) -> Path | None:
        """Return the file or folder; None if the source is in a registry or a daemon."""
        if self.bootstrap in (*_ARCHIVES, "localimage"):
            # docker-archive:FILE[:TAG]
            return Path(self.location if Path(self.location).exists() else self.location.partition(":")[0])
        return None

    @property
    def digest(self) -> str | None:
        """Return the digest that a name in a registry is pinned to."""
        found = _DIGEST.search(self.location)
        return found[1] if found else None

    @property
    def is_moving(self) -> bool:
        """Return whether the same name may refer to another image later."""
        return self.bootstrap in ("docker", "docker-daemon") and self.digest is None


@dataclass(frozen=True)
class Builder:
    """The program that builds images, Apptainer or Singularity."""

    program: str
    version: str
    """Output of --version: `apptainer version 1.4.5`."""

    @property
    def is_apptainer(self) -> bool:
        return "apptainer" in self.version.lower()


def parse_source(text: str) -> ImageSource:
    """Parse docker://NAME, docker-daemon:NAME, docker-archive:FILE, oci-archive:FILE, a SIF file or an unpacked folder.

    Raises:
        UserError: the text is none of these, the file does not exist, or an address contains credentials.
    """
    _refuse_credentials("--from", text)
    agent, colon, rest = text.partition(":")
    if colon and agent in ("docker", "docker-daemon", *_ARCHIVES):
        location = rest.removeprefix("//") if agent == "docker" else rest
        source = ImageSource(agent, location)
        if not location or (agent == "docker") != rest.startswith("//"):
            raise UserError(f"--from {text}: write docker://NAME:TAG, docker-daemon:NAME:TAG or docker-archive:FILE")
    elif "://" in text or (not Path(text).exists() and not text.endswith(".sif") and "/" not in text):
        raise UserError(
            f"--from {text}: not a docker://NAME, docker-daemon:NAME, docker-archive:FILE, oci-archive:FILE, SIF file "
            "or unpacked folder"
        )
    else:
        source = ImageSource("localimage", text)
    if source.file is not None:
        if not source.file.exists():
            raise UserError(f"--from {text}: no such file or folder")
        return ImageSource(source.bootstrap, source.location.replace(str(source.file), str(source.file.absolute()), 1))
    return source


def build_argv(
    builder: Builder,
    out: Path,
    spec: str,
    *,
    sandbox: bool = False,
    build_args: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the command that writes one image.

    Args:
        spec: a source's URI, or a definition file.
        sandbox: write an unpacked folder instead of a SIF file.
        build_args: values of the definition's variables.
    """
    arguments = [word for key, value in (build_args or {}).items() for word in ("--build-arg", f"{key}={value}")]
    zstd = ["--mksquashfs-args", _ZSTD] if builder.is_apptainer and not sandbox else []
    return [builder.program, "build", *(["--sandbox"] if sandbox else zstd), *arguments, str(out), spec]


def definition_args(source: ImageSource, wheel: Path, digest: str | None, more: Sequence[str]) -> dict[str, str]:
    """Return the variables of hpc-rl.def: the source of the image, and what the user sets (KEY=VALUE each).

    Raises:
        UserError: a text of the user is not KEY=VALUE, or contains credentials in an address.
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
    """Raise UserError if an argument, which every user of the machine can see, contains credentials."""
    if re.search(r"//[^/@:\s]*:[^/@\s]+@", text):
        raise UserError(
            f"{option} contains a password in an address: remove it, and set APPTAINER_DOCKER_USERNAME and "
            "APPTAINER_DOCKER_PASSWORD, or log in once (apptainer registry login)"
        )


def space_needed(source: ImageSource) -> int | None:
    """Return the bytes that a build needs; None if the size of the source is not known."""
    if source.file is None or source.file.is_dir():
        return None
    return source.file.stat().st_size * _UNPACKED


def cause_of_failure(log: str, cache: Path) -> str:
    """Return the cause of a failed build and what to do, or an empty text if the output is not known."""
    for pattern, meaning in _CAUSES:
        if re.search(pattern, log, re.IGNORECASE):
            return meaning.format(cache=cache)
    return ""


_CAUSES = (
    (
        "no space left on device|disk quota exceeded",
        "out of space: remove files in {cache}, or set TMPDIR to a larger disk",
    ),
    (
        "unauthorized|authentication required|access denied|denied:",
        "the registry requires credentials: set APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD, or log in "
        "once (apptainer registry login, podman login), which writes a file that only you can read",
    ),
    (r"manifest unknown|name unknown|repository \S* not found", "the registry has no such name or tag"),
    (
        "no such host|i/o timeout|connection refused|network is unreachable",
        "no network connection: build on a machine with internet, or from docker-archive:FILE (docker save)",
    ),
    (
        "user namespace|fakeroot|/etc/subuid",
        "this machine does not let users build images: ask its staff for user namespaces or fakeroot, or use another",
    ),
    ("exec format error", "the image is for another architecture than this machine"),
)
"""Pattern in the output of a failed build -> its cause, and what to do."""
