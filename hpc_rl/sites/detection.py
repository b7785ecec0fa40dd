"""Detection of a cluster from its login node. Each of Slurm's programs is called once, whatever the cluster's size."""

from __future__ import annotations

import contextlib
import grp
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.sites import record
from hpc_rl.sites.proposal import Facts
from hpc_rl.slurm import cluster, commands
from hpc_rl.slurm.place import CLUSTERS, here, is_single
from hpc_rl.system.files import write_atomically

_RELEVANT_MODULES = re.compile(r"(cuda|nvhpc|rocm|nccl|cudnn|gcc)$", re.IGNORECASE)
_RUNTIMES = ("apptainer", "singularity", "enroot")


def look(environ: Mapping[str, str] = os.environ) -> Facts:
    """Collect facts about the cluster and this login node.

    Raises:
        UserError: Slurm is missing or does not answer.
    """
    if shutil.which("sinfo") is None:
        raise UserError("there is no sinfo on PATH: run this on the cluster's login node, where Slurm's programs are")
    place = here(environ)
    if not is_single(place.cluster):
        raise UserError(f"{' or '.join(CLUSTERS)} names several clusters ({place.cluster}): set it to one of them")
    try:
        config, _ = commands.configuration(place)
        groups, partitions = commands.node_groups(place), commands.partitions(place)
        pyxis = ["pyxis"] if commands.has_pyxis() else []
    except commands.NoAnswer as error:
        raise UserError(f"Slurm does not answer: {error}") from error
    associations = []
    if cluster.has_accounting(config):
        with contextlib.suppress(commands.NoAnswer):  # the database may be down, or the program missing
            associations = commands.associations(config.get("ClusterName", ""))
    if not groups or not partitions:
        raise UserError("sinfo lists no nodes: no partition is visible to this user; ask the cluster's administrators")
    return Facts(
        config=config,
        groups=groups,
        partitions=partitions,
        associations=associations,
        unix_groups=frozenset(_group_names()),
        interfaces=cluster.read_interfaces(_output(["ip", "-o", "-4", "addr"])),
        has_modules=any(name in environ for name in ("MODULEPATH", "LMOD_CMD", "MODULESHOME")),
        modules=_modules(environ.get("MODULEPATH", "")),
        runtimes=[name for name in _RUNTIMES if shutil.which(name)] + pyxis,
        proxy=environ.get("https_proxy") or environ.get("HTTPS_PROXY"),
        hf_home=environ.get("HF_HOME"),
        host=os.uname().nodename.partition(".")[0],
        is_root=os.getuid() == 0,
        clusters=place.cluster,
    )


def write(path: Path, text: str, force: bool) -> None:
    """Write a profile atomically.

    Raises:
        UserError: the file exists and `force` is not set, or it cannot be written.
    """
    check_writable(path, force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _, result = record.split(_text_of(path))
        write_atomically(path, f"{text}\n{result}\n" if result else text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def check_writable(path: Path, force: bool) -> None:
    """Check that a profile can be written.

    Raises:
        UserError: the path is a folder, or a profile that must not be replaced.
    """
    try:
        is_folder, is_there = path.is_dir(), path.is_file() and record.has_settings(_text_of(path))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    if is_folder:
        raise UserError(f"{path} is a folder: --out takes a file")
    if is_there and not force:
        raise UserError(f"{path} exists already: --force replaces it, --out FILE writes to another file")


def _text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _group_names() -> list[str]:
    known = {entry.gr_gid: entry.gr_name for entry in grp.getgrall()}
    return [known[number] for number in {os.getgid(), *os.getgroups()} if number in known]


def _modules(path: str) -> list[str]:
    """Return the modules in the folders of MODULEPATH that training may need, as name/version."""
    found = []
    for folder in filter(None, path.split(":")):
        for name in sorted(Path(folder).glob("*")):
            if _RELEVANT_MODULES.match(name.name) and name.is_dir():
                versions = sorted(file.stem if file.suffix == ".lua" else file.name for file in name.glob("[!.]*"))
                found += [f"{name.name}/{version}" for version in versions]
    return found


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
