"""Programs as users have them, as text: none of them knows hpc-rl. Each holds in some steps (tests/e2e/programs.py)."""

_OPTIONS = """
import argparse, json
from holding import hold
parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--steps", type=int)
parser.add_argument("--save_every", type=int, default=0)
parser.add_argument("--resume_from_checkpoint")
options = parser.parse_args()
"""
_TRL = (
    _OPTIONS
    + """
from datasets import Dataset
from transformers import TrainerCallback

class Holds(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        hold(state.global_step)

words = ["apple", "pear", "cat", "dog", "sum", "two", "three", "runs", "fast", "what"]
questions = [f"{words[n % 7]} {words[n % 3]} {words[n % 10]}" for n in range(64)]
answers = [f" {words[(n + 3) % 10]} {words[n % 9]}" for n in range(64)]
saves = {"save_strategy": "steps", "save_steps": options.save_every} if options.save_every else {"save_strategy": "no"}
settings = dict(output_dir=options.output_dir, max_steps=options.steps, use_cpu=True, logging_steps=1, report_to=[],
    per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, bf16=False,
    gradient_checkpointing=False, disable_tqdm=True, **saves)
"""
)

TRL_SFT = (
    _TRL
    + """
from trl import SFTConfig, SFTTrainer
data = Dataset.from_list([{"prompt": q, "completion": a} for q, a in zip(questions, answers)])
trainer = SFTTrainer("model", args=SFTConfig(**settings), train_dataset=data, callbacks=[Holds()])
trainer.train()
trainer.save_model()
"""
)

TRL_DPO = (
    _TRL
    + """
from trl import DPOConfig, DPOTrainer
data = Dataset.from_list([{"prompt": q, "chosen": a, "rejected": " " + q} for q, a in zip(questions, answers)])
trainer = DPOTrainer("model", args=DPOConfig(**settings), train_dataset=data, callbacks=[Holds()])
trainer.train()
trainer.save_model()
"""
)

TRL_GRPO = (
    _TRL
    + """
from trl import GRPOConfig, GRPOTrainer

def vowels(completions, **_):
    return [float(sum(text.count(letter) for letter in "aeiou")) for text in completions]

own = dict(num_generations=4, max_completion_length=8, steps_per_generation=4, num_iterations=2)
data = Dataset.from_list([{"prompt": q} for q in questions])
trainer = GRPOTrainer("model", vowels, args=GRPOConfig(**settings, **own), train_dataset=data, callbacks=[Holds()])
trainer.train()
trainer.save_model()
"""
)

LIGHTNING = (
    _OPTIONS
    + """
import os, torch
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    def training_step(self, batch, number):
        loss = ((self.layers(batch[0]) - batch[1]) ** 2).mean()
        self.log("train_loss", loss)
        return loss
    def on_train_batch_start(self, batch, number):
        hold(self.trainer.global_step)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

L.seed_everything(0)
x = torch.randn(48, 8)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
saves = [ModelCheckpoint(options.output_dir, every_n_train_steps=options.save_every)] if options.save_every else []
trainer = L.Trainer(max_steps=options.steps, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), default_root_dir=options.output_dir, logger=False,
    enable_progress_bar=False, log_every_n_steps=1, callbacks=saves, enable_checkpointing=bool(saves))
trainer.fit(Module(), data)
"""
)

ACCELERATE = (
    _OPTIONS
    + """
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(64, 8)
model = torch.nn.Linear(8, 1)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), data)
done = 0
if options.resume_from_checkpoint:
    accelerator.load_state(options.resume_from_checkpoint)
    done = int(options.resume_from_checkpoint.rpartition("_")[2])
for step, (inputs, targets) in enumerate(skip_first_batches(data, done), done + 1):
    loss = ((model(inputs) - targets) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()}, step=step)
    if step % (options.save_every or 2) == 0:
        accelerator.save_state(f"{options.output_dir}/step_{step}")
    hold(step)
    if step == options.steps:
        break
"""
)

PROGRAMS = {
    "trl_sft": TRL_SFT,
    "trl_dpo": TRL_DPO,
    "trl_grpo": TRL_GRPO,
    "lightning_fit": LIGHTNING,
    "accelerate_loop": ACCELERATE,
}
