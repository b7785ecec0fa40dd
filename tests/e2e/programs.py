"""Programs as users have them, as text: none of them knows hpc-rl. `holding.hold` makes them wait in the middle."""

HOLDING = """
import os, time
from pathlib import Path

def hold(step):
    "Wait after a step of HOLD_AT_STEP until the run is asked to save, which it does after the next one."
    run, steps = Path(os.environ["HPC_RL_RUN_DIR"]), os.environ.get("HOLD_AT_STEP", "").split(",")
    while str(step) in steps and int(os.environ.get("RANK", 0)) == 0 and not (run / "stop").exists():
        time.sleep(0.1)
"""

TRAINER = """
import argparse
from holding import hold
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

class Holds(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        hold(state.global_step)

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--steps", type=int)
options = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained("model")
data = []
for number in range(64):
    ids = tokenizer(f"{number} and {number + 1} are {2 * number + 1} in all.")["input_ids"][:16]
    data.append({"input_ids": ids, "labels": ids})
data = [row for row in data if len(row["input_ids"]) == len(data[-1]["input_ids"])]
settings = TrainingArguments(options.output_dir, max_steps=options.steps, use_cpu=True, logging_steps=1, report_to=[],
    per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True, learning_rate=1e-3)
model = AutoModelForCausalLM.from_pretrained("model")
trainer = Trainer(model, settings, train_dataset=data)
trainer.add_callback(Holds())
trainer.train()
trainer.save_model()
"""

PROGRAMS = {"trainer": TRAINER}
