"""The objectives of fine-tuning, chosen by the type of the configuration.

To add an objective, write a class next to sft.py that derives from `Objective` (base.py), and add it to `OBJECTIVES`.
"""

from __future__ import annotations

from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.config.training.preferences import DpoConfig, PreferenceDataConfig, RmConfig
from hpc_rl.config.training.sft import SftConfig
from hpc_rl.finetune.base import Objective
from hpc_rl.finetune.distill import Distill
from hpc_rl.finetune.dpo import Dpo, Kto
from hpc_rl.finetune.rm import BradleyTerry, Regression
from hpc_rl.finetune.sft import Sft

OBJECTIVES: dict[type[FinetuneConfig], type[Objective]] = {
    SftConfig: Sft,
    DpoConfig: Dpo,
    RmConfig: BradleyTerry,
    DistillConfig: Distill,
}
"""Configuration -> objective."""
LABELLED: dict[type[FinetuneConfig], type[Objective]] = {DpoConfig: Kto, RmConfig: Regression}
"""Configuration -> objective, if the data has labels instead of pairs."""


def objective_of(config: FinetuneConfig) -> Objective:
    """Return the objective of a run."""
    has_labels = isinstance(config.data, PreferenceDataConfig) and bool(config.data.labels)
    return (LABELLED if has_labels else OBJECTIVES)[type(config)](config)
