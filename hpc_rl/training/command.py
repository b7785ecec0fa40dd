"""The command line of the programs that a job starts: a complete configuration, or options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.config.compose import compose, load_config
from hpc_rl.config.job import JobConfig
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.tree import OF_PLACE, changes, read_options
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir


def parse(module: str, about: str | None, arguments: Sequence[str]) -> tuple[str, JobConfig, RunDir | None]:
    """Read the command line of a module that kinds of jobs name as their trainer.

    Args:
        about: description for `--help`.

    Returns:
        the kind, which is the module's first one by default; its configuration; the run directory if one is given.

    Raises:
        UserError: anything in it is wrong.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    kinds = [row.name for row in KINDS.values() if row.trainer == module]
    parser.add_argument("--kind", choices=kinds, default=kinds[0], help="the kind of the job")
    parser.add_argument("--config", type=Path, help="complete configuration (config.yaml of a run directory)")
    parser.add_argument("--run-dir", type=Path, help="run directory; the default is $HPC_RL_RUN_DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    if options.config and options.overrides:
        raise UserError(
            f"--config {options.config} is a complete configuration, so {options.overrides[0]} cannot be added: "
            "change the file, or use key=value without --config"
        )
    if options.config:
        config = load_config(options.kind, options.config)
        if os.environ.get("RANK", "0") == "0":
            _tell_changes(options.config)
    else:
        from hpc_rl.training.parallel.distributed import fill_in_device

        config = compose(options.kind, options.overrides, fill_in=[fill_in_device])
    return options.kind, config, RunDir(options.run_dir.absolute()) if options.run_dir else None


def _tell_changes(config: Path) -> None:
    """Print what differs from the settings of the attempt before, if this is config.yaml of an attempt."""
    attempt = config.absolute().parent
    before = RunDir(attempt.parent).attempt_with_settings(before=attempt)
    if before is None or (before / config.name).read_bytes() == config.read_bytes():
        return
    changed = changes(read_options(before / config.name), read_options(config))
    if lines := [f"  {key}: {text}" for key, text in changed.items() if not key.startswith(OF_PLACE)]:
        print("\n".join([f"hpc-rl: settings that differ from {before.name}:", *lines]), flush=True)
