"""A run in Weights & Biases that can fail without harm: training goes on, and nothing is lost."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir

if TYPE_CHECKING:
    import wandb

_INIT_TIMEOUT_S = 60
_FINISH_TIMEOUT_S = 120


class WandbRun:
    """One wandb run, online or offline; where the server cannot be reached, it falls back to offline with a warning.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: Mapping[str, Any],
        *,
        project: str,
        name: str,
        mode: str,
        proxy: str | None,
        run_id: str | None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("trainer.logger has wandb, which is not installed: pip install wandb") from error
        settings = wandb.Settings(
            # As settings they reach wandb's own process only; as variables they would reach gRPC and NCCL too.
            http_proxy=proxy,
            https_proxy=proxy,
            init_timeout=_INIT_TIMEOUT_S,
            finish_timeout=_FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            console="off",  # the run directory has the logs already
            silent=True,
        )

        def start(mode: str) -> wandb.Run:
            return wandb.init(
                dir=run_dir.path,
                config=dict(config),
                project=project,
                name=name,
                mode="offline" if mode == "offline" else "online",
                id=run_id,
                # Offline too: `wandb sync` else writes each attempt over the one before it.
                resume="allow" if run_id else None,
                settings=settings,
            )

        self._error = wandb.Error
        self._run_dir = run_dir.path
        try:
            self._run = start(mode)
        except wandb.Error as error:
            _warn(f"wandb cannot be used online, so it writes into {run_dir.path} instead: {_first_line(error)}")
            self._run = start("offline")
            mode = "offline"
        self._offline = mode == "offline"
        # Steps as a metric of their own: wandb's step counter refuses what a resumed run logs again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._works = True

    @property
    def id(self) -> str:
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._works:
            return
        try:
            self._run.log({"step": step, **metrics})
        except self._error as error:
            self._stop_logging(error)

    def _stop_logging(self, error: Exception) -> None:
        self._works = False
        _warn(f"wandb stopped working, training goes on without it: {_first_line(error)}")

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table with one row for each of `rows`, whose columns are those of the first."""
        import wandb

        if not self._works:
            return
        columns = list(rows[0])
        table = wandb.Table(columns=columns, data=[[str(row[column]) for column in columns] for row in rows])
        try:
            self._run.log({"step": step, name: table})
        except self._error as error:
            self._stop_logging(error)

    def finish(self, exit_code: int) -> None:
        """Upload what is left, for two minutes at most; prints how to upload what is still left then."""
        folder = self._run.settings.sync_dir
        try:
            self._run.finish(exit_code=exit_code)
        except (self._error, TimeoutError) as error:
            _warn(f"wandb could not finish: {_first_line(error)}")
            if not self._offline:
                _say_upload(f"wandb sync --include-online {shlex.quote(str(folder))}")
        if self._offline:
            _say_upload(f"hpc-rl wandb sync {shlex.quote(str(self._run_dir))}")


def _say_upload(command: str) -> None:
    print(f"To upload the metrics: {command}", flush=True)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
