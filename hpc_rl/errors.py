"""Errors that the user can fix, and the exit codes."""

EXIT_BAD_INPUT = 2
"""The request is invalid; nothing was started."""
EXIT_STOPPED = 75
"""The run saved and exited early (EX_TEMPFAIL of sysexits.h). Starting it again in its run directory resumes it."""


class UserError(Exception):
    """Bad input: only the message is shown, without a traceback, and the exit code is 2.

    The message states what was requested, what was found and what to do.
    """

    exit_code = EXIT_BAD_INPUT


class UnclearError(UserError):
    """Slurm did not state whether it accepted a job. The job may be in the queue, so its run directory has to stay."""


class RunError(UserError):
    """An error that the user can fix but that appears only while a job runs: shown like bad input, with exit code 1.

    Args:
        exit_code: another exit code, for example of a process that was killed.
    """

    exit_code = 1

    def __init__(self, message: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class AgreedError(UserError):
    """A UserError that every rank of a job raises with the same message, so that only rank 0 prints it."""


class AgreedRunError(AgreedError, RunError):
    """A RunError that every rank of a job raises with the same message."""
