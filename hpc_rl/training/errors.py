"""Errors of a job with several ranks. Imports nothing heavy."""

from __future__ import annotations

from hpc_rl.errors import RunError, UserError


class AgreedError(UserError):
    """A UserError that every rank raises with the same message, so that rank 0 alone need print it."""


class AgreedRunError(AgreedError, RunError):
    """The same for what goes wrong while running."""

    exit_code = RunError.exit_code
