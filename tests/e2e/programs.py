"""Programs as users have them, as text: none of them knows hpc-rl. `holding.hold` makes them wait in the middle."""

HOLDING = '''
import os, time
from pathlib import Path

def hold(step):
    """Note that this attempt has made a step, and wait after one of HOLD_AT_STEP: until the run is asked to save."""
    if int(os.environ.get("RANK", 0)):
        return
    with Path(os.environ["HPC_RL_ATTEMPT_DIR"], "steps").open("a") as file:
        print(step, file=file)
    until = Path(os.environ["HPC_RL_RUN_DIR"], os.environ.get("HOLD_UNTIL", "stop"))
    while str(step) in os.environ.get("HOLD_AT_STEP", "").split(",") and not until.exists():
        time.sleep(0.1)

if "RANK" in os.environ and "HOLD_TRAINER" in os.environ:
    from transformers.trainer_callback import CallbackHandler
    begin = CallbackHandler.on_step_begin

    def on_step_begin(self, args, state, control):
        hold(state.global_step)
        return begin(self, args, state, control)

    CallbackHandler.on_step_begin = on_step_begin
'''
"""Of transformers' Trainer, all programs hold if HOLD_TRAINER is set and a `sitecustomize.py` imports this."""

OPTIONS = """
import argparse, os
from holding import hold
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--steps", type=int)
parser.add_argument("--save_every", type=int, default=1000)
parser.add_argument("--resume_from_checkpoint")
options = parser.parse_args()
"""
SETTINGS = """
settings = dict(output_dir=options.output_dir, max_steps=options.steps, save_steps=options.save_every, use_cpu=True,
    logging_steps=1, report_to=[], per_device_train_batch_size=2, learning_rate=1e-3, disable_tqdm=True)
"""
TRAINER = f"""
{OPTIONS}
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
{SETTINGS}
tokenizer = AutoTokenizer.from_pretrained("model")
data = []
for number in range(64):
    ids = tokenizer(f"{{number}} and {{number + 1}} are {{2 * number + 1}} in all.")["input_ids"][:16]
    data.append({{"input_ids": ids, "labels": ids}})
data = [row for row in data if len(row["input_ids"]) == len(data[-1]["input_ids"])]
model = AutoModelForCausalLM.from_pretrained("model")
trainer = Trainer(model, TrainingArguments(**settings), train_dataset=data)
trainer.train()
trainer.save_model()
"""
PROGRAMS = {"trainer": TRAINER}
FILES = {"holding.py": HOLDING, "sitecustomize.py": "import holding\n"}
"""What is beside a program, in a folder of PYTHONPATH."""
