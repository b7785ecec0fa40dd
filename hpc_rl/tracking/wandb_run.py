"""A run in Weights & Biases. If wandb fails, training continues and metrics.jsonl has everything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.wandb_sync import check_settings

if TYPE_CHECKING:
    import wandb

_INIT_TIMEOUT_S = 60
_FINISH_TIMEOUT_S = 120


class WandbRun:
    """One wandb run, online or offline. If the server cannot be reached, it falls back to offline with a warning.

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
            raise UserError("trainer.logger includes wandb, but wandb is not installed: pip install wandb") from error
        check_settings()
        settings = wandb.Settings(
            # Settings reach wandb's own process only; environment variables would also reach gRPC and NCCL.
            http_proxy=proxy,
            https_proxy=proxy,
            init_timeout=_INIT_TIMEOUT_S,
            finish_timeout=_FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            console="off",  # the run directory already has the logs
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
                # Offline too: otherwise `wandb sync` overwrites each attempt with the next one.
                resume="allow" if run_id else None,
                settings=settings,
            )

        self._run_dir = run_dir.path
        try:
            self._run = start(mode)
        except wandb.Error as error:
            _warn(f"wandb cannot be used online and writes to {run_dir.path} instead: {_first_line(error)}")
            self._run = start("offline")
            mode = "offline"
        self._offline = mode == "offline"
        # A metric of its own for the step: wandb's step counter rejects steps that a resumed run logs again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._works = True

    @property
    def id(self) -> str:
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, lambda: metrics)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table with the columns of the first row."""
        import wandb

        columns = list(rows[0])
        data = [[str(row[column]) for column in columns] for row in rows]
        self._log(step, lambda: {name: wandb.Table(columns=columns, data=data)})

    def _log(self, step: int, values: Callable[[], Mapping[str, Any]]) -> None:
        """Log values, which are created here: a table is written to a file. After an error nothing more is logged."""
        if not self._works:
            return
        try:
            self._run.log({"step": step, **values()})
        except Exception as error:  # noqa: BLE001 - wandb passes on errors of the system, such as those of a full disk
            self._works = False
            _warn(f"wandb failed; training continues without it: {_first_line(error)}")

    def finish(self, exit_code: int) -> None:
        """Upload the rest within two minutes, and print how to upload anything that remains."""
        folder = self._run.settings.sync_dir
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:  # noqa: BLE001 - as in _log
            _warn(f"wandb could not finish: {_first_line(error)}")
            if not self._offline:
                _print_upload_command(f"wandb sync --include-online {shlex.quote(str(folder))}")
        if self._offline:
            _print_upload_command(f"hpc-rl wandb sync {shlex.quote(str(self._run_dir))}")


def _print_upload_command(command: str) -> None:
    print(f"To upload the metrics: {command}", flush=True)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
