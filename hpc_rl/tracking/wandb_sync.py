"""Upload of offline wandb runs, from a login node, by wandb's own `wandb sync`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_rl.errors import RunError, UserError
from hpc_rl.host.processes import die_with_parent, python_with
from hpc_rl.run_dir import RunDir

_RETRIES = {
    "WANDB__GRAPHQL_RETRY_MAX": "4",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "5",
    "WANDB_HTTP_TIMEOUT": "20",
}
"""wandb's settings: two minutes at most for a server that does not answer, instead of twenty."""
_CUT_OFF = "incomplete record"
"""What wandb says of a file without an end, after it has uploaded all that is there."""
_EMPTY_BYTES = 7
"""A file that wandb has opened and not yet written to."""
_NO_WANDB = "wandb is not installed here: pip install wandb"


def sync(run: RunDir) -> None:
    """Upload a run's offline runs that are new since the last time, oldest first; prints what was uploaded.

    Raises:
        UserError: there are none, wandb is not installed, or it has no login.
        RunError: the upload failed; wandb's own words are in the message.
    """
    found = offline_runs(run)
    if not found:
        raise UserError(
            f"run {run.name} has no offline wandb runs in {run.path}/wandb: they come from "
            "trainer.logger=[console,wandb] with trainer.wandb_mode=offline"
        )
    new = [file for file in found if not is_uploaded(file)]
    if not new:
        print(f"run {run.name}: everything is uploaded already ({len(found)} offline)")
        return
    other, proxy = _job_settings(run)
    python = python_with("wandb", other)
    if python is None:
        raise UserError(_NO_WANDB)
    environ = sync_environment(os.environ, run, proxy)
    pages = set()
    for file in new:
        # One at a time: after the file of an attempt that was killed, wandb gives up the others of the same run.
        words = _run([python, "-P", "-m", "wandb", "sync", "--include-synced", str(file.parent)], environ)
        pages |= {line.rpartition(" at ")[2] for line in words if "View run" in line}
        whole = is_uploaded(file)
        if not whole:
            _check_cut_off(run, words)
            _mark(file).touch()
        shown = file.parent.relative_to(run.path)
        print(f"uploaded {shown}" + ("" if whole else ", which ends early: the attempt was killed, or still runs"))
    for page in sorted(pages):
        print(f"  {page}")


def offline_runs(run: RunDir) -> list[Path]:
    """The files of offline runs, oldest first: one for each attempt (wandb puts the time into the folder's name)."""
    files = sorted(run.path.glob("wandb/offline-run-*/*.wandb"))
    return [file for file in files if file.stat().st_size > _EMPTY_BYTES]


def is_uploaded(file: Path) -> bool:
    """Whether wandb has marked the file as uploaded, and nothing was written after that."""
    mark = _mark(file)
    return mark.exists() and mark.stat().st_mtime >= file.stat().st_mtime


def _mark(file: Path) -> Path:
    """The file by which wandb knows what it has uploaded."""
    return file.with_name(file.name + ".synced")


def sync_environment(environ: Mapping[str, str], run: RunDir, proxy: str | None) -> dict[str, str]:
    """The environment of `wandb sync`: the user's own, which may have the key, and the proxy of trainer.wandb_proxy."""
    proxies = {"WANDB_HTTP_PROXY": proxy, "WANDB_HTTPS_PROXY": proxy} if proxy else {}
    return {**_RETRIES, **environ, **proxies, "WANDB_DIR": str(run.path)}


def _job_settings(run: RunDir) -> tuple[str | None, str | None]:
    """Python of the job and proxy for wandb, as the run was configured.

    Read as they stand: a run of an older version may have other options, and is uploaded all the same.
    """
    import yaml

    tree = yaml.safe_load(run.config.read_text()) if run.config.is_file() else {}
    return tree.get("slurm", {}).get("python"), tree.get("trainer", {}).get("wandb_proxy")


def _run(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What wandb printed."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,  # it would ask for a key
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
            check=False,
        )
    except OSError as error:
        raise UserError(f"cannot start {command[0]} (slurm.python): {error.strerror}") from error
    return done.stdout.splitlines()


def _check_cut_off(run: RunDir, words: Sequence[str]) -> None:
    """Whether all but the end of a file was uploaded; anything else is an error."""
    text = "\n".join(words)
    if "No module named wandb" in text:
        raise UserError(_NO_WANDB)
    if "No API key" in text:
        raise UserError("wandb has no login on this machine: `wandb login`, or WANDB_API_KEY in the environment")
    if _CUT_OFF not in text:
        log = run.path / "wandb" / "sync.log"
        log.write_text(text + "\n")
        errors = [line.partition("ERROR")[2].strip() for line in words if "ERROR" in line]
        reason = next(iter([*errors, *words[-1:]]), "it said nothing")
        raise RunError(f"run {run.name}: wandb could not upload: {reason} (all that it said: {log})")
