"""Other people's programs as users start them, and how each is tried. Those in Python are here as text: none of them
knows hpc-rl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.programs import OPTIONS, SETTINGS, TRAINER

_TRL = f"""
{OPTIONS}
from datasets import Dataset
{SETTINGS}
settings |= dict(gradient_accumulation_steps=2, bf16=False, gradient_checkpointing=False)
words = ["apple", "pear", "cat", "dog", "sum", "two", "three", "runs", "fast", "what"]
questions = [f"{{words[n % 7]}} {{words[n % 3]}} {{words[n % 10]}}" for n in range(64)]
answers = [f" {{words[(n + 3) % 10]}} {{words[n % 9]}}" for n in range(64)]
"""

TRL_SFT = (
    _TRL
    + """
from trl import SFTConfig, SFTTrainer
data = Dataset.from_list([{"prompt": q, "completion": a} for q, a in zip(questions, answers)])
trainer = SFTTrainer("model", args=SFTConfig(**settings), train_dataset=data)
trainer.train()
trainer.save_model()
"""
)

TRL_DPO = (
    _TRL
    + """
from trl import DPOConfig, DPOTrainer
data = Dataset.from_list([{"prompt": q, "chosen": a, "rejected": " " + q} for q, a in zip(questions, answers)])
trainer = DPOTrainer("model", args=DPOConfig(**settings), train_dataset=data)
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
trainer = GRPOTrainer("model", vowels, args=GRPOConfig(**settings, **own), train_dataset=data)
trainer.train()
trainer.save_model()
"""
)

LIGHTNING = (
    OPTIONS
    + """
import torch
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
trainer = L.Trainer(max_steps=options.steps, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), default_root_dir=options.output_dir, logger=False,
    enable_progress_bar=False, log_every_n_steps=1,
    callbacks=[ModelCheckpoint(options.output_dir, every_n_train_steps=options.save_every)])
trainer.fit(Module(), data)
"""
)

ACCELERATE = (
    OPTIONS
    + """
import time, torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(128, 8)
model = torch.nn.Linear(8, 1)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), data)
done = 0
if options.resume_from_checkpoint:
    accelerator.load_state(options.resume_from_checkpoint)
    done = int(options.resume_from_checkpoint.rpartition("_")[2])
for step, (inputs, targets) in enumerate(skip_first_batches(data, done), done + 1):
    time.sleep(0.5)  # it goes on until it is ended
    loss = ((model(inputs) - targets) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()}, step=step)
    if step % options.save_every == 0:
        accelerator.save_state(f"{options.output_dir}/step_{step}")
    hold(step)
    if step == options.steps:
        break
"""
)

SCRIPTS = {
    "trainer": TRAINER,
    "trl_sft": TRL_SFT,
    "trl_dpo": TRL_DPO,
    "trl_grpo": TRL_GRPO,
    "lightning_fit": LIGHTNING,
    "accelerate_loop": ACCELERATE,
}
_MESSAGES = """datasets:
  - {path: chats.jsonl, ds_type: json, type: chat_template, field_messages: messages}
"""
AXOLOTL = f"""base_model: ./model
{_MESSAGES}dataset_prepared_path: prepared
val_set_size: 0
sequence_len: 128
micro_batch_size: 2
gradient_accumulation_steps: 2
optimizer: adamw_torch
learning_rate: 0.001
bf16: false
fp16: false
tf32: false
logging_steps: 1
plugins:
  - axolotl_on_cpus.OnCpus
"""
AXOLOTL_ON_CPUS = """from axolotl.integrations.base import BasePlugin

class OnCpus(BasePlugin):
    def load_datasets(self, cfg, preprocess=False):
        cfg.device_map = {"": "cpu"}  # several ranks would load it to GPUs
"""
LLAMA_FACTORY = """model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset: chats
dataset_dir: .
template: qwen
cutoff_len: 128
logging_steps: 1
overwrite_output_dir: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
report_to: none
use_cpu: true
disable_gradient_checkpointing: true
"""
LLAMA_DATA = """{"chats": {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}}}
"""
CHATS = "".join(
    f'{{"messages": [{{"role": "user", "content": "{n} and {n + 1}?"}}, '
    f'{{"role": "assistant", "content": "{2 * n + 1} in all."}}]}}\n'
    for n in range(64)
)
FILES: Mapping[str, str] = {
    "axolotl.yaml": AXOLOTL,
    "axolotl_on_cpus.py": AXOLOTL_ON_CPUS,
    "llama.yaml": LLAMA_FACTORY,
    "dataset_info.json": LLAMA_DATA,
    "chats.jsonl": CHATS,
    **{f"{name}.py": text for name, text in SCRIPTS.items()},
}
BESIDE_VERL = Path(__file__).parent / "beside_verl"
_SCRIPT = "--output_dir out-{run} --steps {steps} --save_every {every}"
_SWIFT = """swift sft --model model --model_type qwen2 --template chatml --dataset chats.jsonl --split_dataset_ratio 0
    --tuner_type full --torch_dtype float32 --output_dir out-{run} --per_device_train_batch_size 2
    --gradient_accumulation_steps 2 --max_steps {steps} --save_steps {every} --learning_rate 1e-3 --logging_steps 1
    --report_to none --use_cpu true --gradient_checkpointing false --dataloader_num_workers 0 --dataset_num_proc 1"""
_VERL = """-m verl.trainer.sft_trainer data.train_files=chats.parquet data.train_batch_size=8 data.max_length=64
    data.micro_batch_size_per_gpu=4 data.num_workers=0 data.max_token_len_per_gpu=256 data.pad_mode=no_padding
    engine.strategy=fsdp2 model.path=verl-model +model.override_config.attn_implementation=sdpa
    model.enable_gradient_checkpointing=False model.use_remove_padding=False trainer.logger=[console]
    trainer.device=cpu trainer.total_training_steps={steps} trainer.save_freq={every} optim.lr=1e-3"""
_ON_CPUS = {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpus", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
_TRAINER = {
    "HOLD_TRAINER": "1",
    "ACCELERATE_TORCH_DEVICE": "cpu",
}  # accelerate 1.11 makes it cpu:0, which torch cannot load


@dataclass(frozen=True)
class Tried:
    """A program that is tried on two nodes. It is interrupted at steps at which it holds.

    Args:
        adapter: name of the row of ADAPTERS.
        title: in the table of docs/other-programs.md.
        packages: whose versions are in that table.
        environment: in build/programs.
        every: saves after each so many steps.
        holds: the steps: a preemption, a lost node and a stop, the walltime.
    """

    adapter: str
    title: str
    packages: Sequence[str]
    command: str
    environment: str = "trainers"
    variables: Mapping[str, str] = field(default_factory=lambda: _TRAINER)
    steps: int = 10
    every: int = 3
    holds: tuple[int, int, int] = (1, 4, 7)
    is_exact: bool = True
    """Whether it ends with the step at which it has saved, and repeats none."""


TRIED: Mapping[str, Tried] = {
    "trainer": Tried("transformers", "transformers' Trainer", ["transformers"], f"python trainer.py {_SCRIPT}"),
    "trainer-4": Tried(
        "transformers", "transformers' Trainer", ["transformers"], f"python trainer.py {_SCRIPT}", "transformers-4"
    ),
    "trl-sft": Tried("trl", "TRL, SFT", ["trl", "transformers"], f"python trl_sft.py {_SCRIPT}"),
    "trl-dpo": Tried("trl", "TRL, DPO", ["trl", "transformers"], f"python trl_dpo.py {_SCRIPT}"),
    "trl-grpo": Tried(
        "trl", "TRL, GRPO", ["trl", "transformers"], f"python trl_grpo.py {_SCRIPT}", steps=14, every=4, holds=(1, 5, 9)
    ),
    "axolotl": Tried(
        "axolotl",
        "Axolotl",
        ["axolotl"],
        "axolotl train axolotl.yaml --output-dir out-{run} --max-steps {steps} --save-steps {every}",
        "axolotl",
    ),
    "llamafactory": Tried(
        "llamafactory",
        "LLaMA-Factory",
        ["llamafactory"],
        "llamafactory-cli train llama.yaml output_dir=out-{run} max_steps={steps} save_steps={every}",
        "llamafactory",
    ),
    "ms-swift": Tried("ms-swift", "ms-swift", ["ms_swift"], _SWIFT, "ms-swift"),
    "lightning": Tried("lightning", "Lightning", ["lightning"], f"python lightning_fit.py {_SCRIPT}", variables={}),
    "accelerate": Tried(
        "accelerate",
        "a loop with accelerate",
        ["accelerate"],
        f"python accelerate_loop.py {_SCRIPT}",
        variables={},
        steps=26,
        every=6,
        holds=(1, 8, 13),
        is_exact=False,
    ),
    "verl-sft": Tried("verl-sft", "verl, SFT", ["verl"], _VERL, "verl", _ON_CPUS),
}
KINDS = ["trl-sft", "lightning", "accelerate", "verl-sft"]
"""One program of each kind."""
