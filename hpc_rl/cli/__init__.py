"""The commands: parse, call, print. Heavy imports are inside the commands, so that --help answers immediately."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

from hpc_rl.cli import submit, lend, adopt, plan, sweep, models, runs, results, config, data, cluster, image  # noqa: F401 # isort: skip - in order
from hpc_rl.cli.app import app
from hpc_rl.errors import EXIT_BAD_INPUT, UserError
from hpc_rl.liveness.activity import shown_activity
from hpc_rl.liveness.shown_text import escaped_output
from hpc_rl.system.disk import UNWRITABLE, explained
from hpc_rl.system.ownership import name_user
from hpc_rl.system.search_path import without_empty_entries

_IMPOSSIBLE_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
"""Errors of paths that come from the user and cannot be opened: bad input in every command."""


def main() -> NoReturn:
    """Run a command. Errors of the user are shown without a traceback; the exit code is 2, or 1 for a RunError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or a file whose encoding lacks a character shows ?
    os.environ.update(without_empty_entries(os.environ))
    # The help texts are ours, and may have colours.
    if _asks_for_help(sys.argv[1:]):
        _run()
    with escaped_output(), shown_activity():
        _run()


def _asks_for_help(words: list[str]) -> bool:
    """Return whether the user, or the shell that completes a command, asks for what may be typed."""
    return not words or words[-1] in ("-h", "--help")


def _run() -> NoReturn:
    try:
        name_user()
        app(standalone_mode=True, prog_name="hpc-rl")
    except UserError as error:
        for line in str(error).splitlines():
            print(f"hpc-rl: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        if error.errno not in (*_IMPOSSIBLE_PATH, *UNWRITABLE):
            raise
        path = str(error.filename or Path.cwd())
        reason = explained(error, Path(path)) if error.errno in UNWRITABLE else error.strerror
        print(f"hpc-rl: {path if len(path) < 100 else f'{path[:100]}...'}: {reason}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(0)
