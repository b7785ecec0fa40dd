"""Errors that are the user's to fix."""

EXIT_BAD_INPUT = 2
"""What was asked cannot work; nothing was started."""
EXIT_STOPPED = 75
"""Saved and left before the end (EX_TEMPFAIL of sysexits.h): starting again in the same run directory goes on."""


class UserError(Exception):
    """Bad input: shown as its message alone, without a traceback, and with exit code 2.

    The message says what was asked, what was found and what to do.
    """

    exit_code = EXIT_BAD_INPUT


class RunError(UserError):
    """Something went wrong while running that the user can do something about: a line as well, but exit code 1."""

    exit_code = 1


class AgreedError(UserError):
    """A UserError that every rank of a job raises with the same message, so that only rank 0 prints it."""


class AgreedRunError(AgreedError, RunError):
    """A RunError that every rank of a job raises with the same message."""

    exit_code = RunError.exit_code
