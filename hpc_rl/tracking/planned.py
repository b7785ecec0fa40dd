"""What the plan of a run expected, as job.json has it, beside what the run recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from hpc_rl.run_dir import RunDir

KEY = "plan"
"""Of job.json."""


@dataclass(frozen=True)
class Expected:
    """What a plan expected: the memory of a GPU in 10^9 bytes, and the time of a step."""

    phase: str
    """The phase with the most memory."""
    peak_gb: float
    """The memory of that phase."""
    usable_gb: float
    training_gb: float
    """The most memory of the training processes, without an engine in other processes: what a run records. 0 if the job
    trains nothing."""
    less: list[str]
    """Settings, as key=value, with which the peak is clearly lower; empty if there are none."""
    gpu: str = ""
    """The kind of GPUs; runs on the same kind can be compared."""
    gpus: int = 0
    """Number of GPUs of the job."""
    parameters: int = 0
    """Of the model."""
    items: int = 0
    """Samples or responses of a step."""
    step_s: Sequence[float] = ()
    """The shortest and the longest time of a step in seconds; empty if no speed is known."""

    def beside(self, recorded_gb: float) -> str:
        """Return plan and recorded peak in a sentence, for a run that ended for lack of memory.

        Args:
            recorded_gb: 0 if nothing was recorded.
        """
        recorded = f"the run recorded {recorded_gb:.1f} GB" if recorded_gb else "the run recorded no complete step"
        less = f"; less memory: {' '.join(self.less)}" if self.less else ""
        training = f", and {self.training_gb:.1f} GB in the training processes" if self.training_gb else ""
        return (
            f"expected at most {self.peak_gb:.1f} of {self.usable_gb:.1f} usable GB, in the phase `{self.phase}`"
            f"{training}; {recorded}{less}"
        )


def read_expected(run: RunDir) -> Expected | None:
    """Return what the plan of a run expected; None if there was none, or job.json has another form."""
    try:
        return _EXPECTED.validate_python(run.read_job().get(KEY))
    except ValidationError:
        return None


_EXPECTED = TypeAdapter(Expected)
