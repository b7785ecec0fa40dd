"""The plan of a step of fine-tuning against the peaks that simulated GPUs trace: within 10 %, for each kind of layers.

transformers computes layers with a state with its own code, as it does on a GPU without kernels.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.families import FEW_LAYERS
from tests.simulated_gpu.scenarios import Job
from tests.simulated_gpu.test_plan import HALF, KEEP, LORA, compare

TOLERANCE = 0.1


def case(kind: str, *options: str, often: bool = False) -> Any:
    """Return a parameter of the test: rows of two samples, and a batch that fills its micro-batches."""
    length = 128 if kind == "jamba" else 512
    filled = (*options, "data.train_batch_size=4096")
    job = Job(kind, micro_tokens=2 * length, length=length, options=filled)
    name = "-".join([kind, *(word.split("=")[-1] for word in options)])
    return pytest.param(job, id=name, marks=[] if often else [pytest.mark.long])


CASES = [
    *(case(kind, *options) for kind in FEW_LAYERS for options in ((KEEP,), ()) if kind != "lfm2"),
    case("lfm2", KEEP, often=True),
    case("lfm2"),
    case("lfm2", HALF),
    case("nemotron_h", HALF),
    case("deepseek_v3", *LORA, KEEP),
    case("qwen3_5_text", *LORA, KEEP),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", CASES)
def test_plan_is_close_for_other_layers(job: Job) -> None:
    compare("sft", job, TOLERANCE)
