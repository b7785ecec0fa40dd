"""The commands: parse, call, print. Heavy imports only inside a command, so that --help answers at once."""

from __future__ import annotations

import sys
from typing import NoReturn

from hpc_rl.cli import init, submit, runs, clean, operations, views, doctor, site, config, models, data, hub, image  # noqa: F401 # isort: skip - in order
from hpc_rl.cli.app import app
from hpc_rl.errors import UserError


def main() -> NoReturn:
    """Run a command; a user's mistake is a line and exit code 2 (1 where it showed later), without a traceback."""
    try:
        app(standalone_mode=True, prog_name="hpc-rl")
    except UserError as error:
        for line in str(error).splitlines():
            print(f"hpc-rl: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    sys.exit(0)
