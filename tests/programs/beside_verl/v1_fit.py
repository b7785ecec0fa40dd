"""Run the real PPOTrainer.fit of verl's V1 with stand-ins for its workers: v1_fit.py RUN_DIR ARGUMENT..."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import verl.trainer.ppo.v1.trainer_base as base
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback

run = Path(sys.argv[1])
with initialize_config_module("verl.trainer.config", version_base=None):
    settings = compose("ppo_trainer", ["trainer.logger=[console]", "trainer.val_before_train=False", *sys.argv[2:]])
OmegaConf.resolve(settings)
OmegaConf.set_struct(settings, True)


class Trainer(base.PPOTrainer):
    def __init__(self):
        self.config, self.checkpoint_callback = settings, build_checkpoint_callback(settings)
        self.use_critic, self.trainer_mode = False, "sync"
        self.total_training_steps, self.steps_per_epoch, self.global_steps = 50, 100, 0
        self.actor_rollout_wg = SimpleNamespace(save_checkpoint=lambda *_, **__: None)
        self.train_dataloader = SimpleNamespace(state_dict=dict)

    def step(self, metrics, timing_raw):
        time.sleep(0.3)
        if self.global_steps == 3:
            (run / "stop").touch()
        return SimpleNamespace(keys=[], partition_id="train")

    def _compute_metrics(self, batch, metrics, timing_raw, **_):
        metrics["actor/pg_loss"] = 0.5

    def on_step_end(self): ...
    def on_sample_end(self): ...
    def _start_profiling(self): ...
    def _stop_profiling(self): ...
    def _shutdown_dump_executor(self): ...


base.tq.kv_clear = lambda **_: None
base.SkipManager.init = staticmethod(lambda _: None)
Trainer().fit(None)
print("fit returned")
