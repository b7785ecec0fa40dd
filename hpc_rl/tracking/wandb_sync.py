"""Upload of offline wandb runs from a login node, with `wandb sync`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_rl.config.tree import read_options
from hpc_rl.errors import RunError, UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import write_atomically
from hpc_rl.system.ownership import refuse_foreign
from hpc_rl.system.processes import die_with_parent, python_with

_RETRIES = {
    "WANDB__GRAPHQL_RETRY_MAX": "4",
    "WANDB__GRAPHQL_RETRY_WAIT_MAX_SECONDS": "5",
    "WANDB_HTTP_TIMEOUT": "20",
}
"""Settings of wandb: give up after two minutes if the server does not answer, instead of twenty."""
_CUT_OFF = "incomplete record"
"""The message of wandb about a file without an end, whose content it has uploaded."""
_EMPTY_BYTES = 7
"""Size of a file that wandb has opened but not yet written to."""
_NO_WANDB = "wandb is not installed here: pip install wandb"


def sync(run: RunDir) -> None:
    """Upload a run's offline wandb runs that are not uploaded yet, oldest first, and print each.

    Raises:
        UserError: there are none, wandb is not installed, or there is no login; or another user could have written the
            configuration, whose Python would run with this user's key.
        RunError: the upload failed; the message has wandb's reason.
    """
    run.check_owner()
    found = offline_runs(run)
    if not found:
        raise UserError(
            f"run {run.name} has no offline wandb runs in {run.path}/wandb: they are written with "
            "trainer.logger=[console,wandb] and trainer.wandb_mode=offline"
        )
    new = [file for file in found if not is_uploaded(file)]
    if not new:
        print(f"run {run.name}: all {len(found)} offline wandb runs are already uploaded")
        return
    other, proxy = _job_settings(run)
    python = python_with("wandb", other)
    if python is None:
        raise UserError(_NO_WANDB)
    check_settings()
    environ = sync_environment(os.environ, run, proxy)
    pages = set()
    for file in new:
        # One at a time: after the file of a killed attempt, wandb skips the other files of the same run.
        words = _run([python, "-P", "-m", "wandb", "sync", "--include-synced", str(file.parent)], environ)
        pages |= {line.rpartition(" at ")[2] for line in words if "View run" in line}
        whole = is_uploaded(file)
        if not whole:
            _check_cut_off(run, words)
            _mark(file).touch()
        shown = file.parent.relative_to(run.path)
        print(f"uploaded {shown}" + ("" if whole else ", which is incomplete: the attempt was killed or still runs"))
    for page in sorted(pages):
        print(f"  {page}")


def check_settings() -> None:
    """Refuse ./wandb/settings, which wandb reads at its start, if another user may have written it.

    It can name the server that gets metrics and the user's key.
    """
    if (found := Path("wandb", "settings")).exists():
        refuse_foreign(str(found), found)


def offline_runs(run: RunDir) -> list[Path]:
    """Return the files of offline runs, oldest first: one per attempt (the folder's name contains the time)."""
    files = sorted(run.path.glob("wandb/offline-run-*/*.wandb"))
    return [file for file in files if file.stat().st_size > _EMPTY_BYTES]


def is_uploaded(file: Path) -> bool:
    """Whether wandb has marked the file as uploaded and nothing was written since."""
    mark = _mark(file)
    return mark.exists() and mark.stat().st_mtime >= file.stat().st_mtime


def _mark(file: Path) -> Path:
    return file.with_name(file.name + ".synced")


def sync_environment(environ: Mapping[str, str], run: RunDir, proxy: str | None) -> dict[str, str]:
    """Return the environment of `wandb sync`: the user's, which may have the key, with trainer.wandb_proxy."""
    proxies = {"WANDB_HTTP_PROXY": proxy, "WANDB_HTTPS_PROXY": proxy} if proxy else {}
    return {**_RETRIES, **environ, **proxies, "WANDB_DIR": str(run.path)}


def _job_settings(run: RunDir) -> tuple[str | None, str | None]:
    """Return the Python of the job and the proxy for wandb, as the run was configured.

    The file is not validated: a run of an older version may have other options and is uploaded as well.
    """
    options = read_options(run.latest_settings)
    return options.get("slurm.python"), options.get("trainer.wandb_proxy")


def _run(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,  # otherwise it asks for a key
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
    """Raise an error unless the file was uploaded except for its end."""
    text = "\n".join(words)
    if "No module named wandb" in text:
        raise UserError(_NO_WANDB)
    if "No API key" in text:
        raise UserError("wandb has no login on this machine: run `wandb login`, or set WANDB_API_KEY")
    if _CUT_OFF not in text:
        log = run.path / "wandb" / "sync.log"
        write_atomically(log, text + "\n")
        errors = [line.partition("ERROR")[2].strip() for line in words if "ERROR" in line]
        reason = next(iter([*errors, *words[-1:]]), "no message")
        raise RunError(f"run {run.name}: wandb could not upload: {reason} (full output: {log})")
