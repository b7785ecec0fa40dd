"""One check per column of the table: a function that returns a note, or raises the reason why not.

The product's own functions load, train, resume and export. What they compute is compared with transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.finetune import trainer
from hpc_rl.finetune.train import parse
from hpc_rl.formats.model_families import refuse_family, refuse_unserved
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm, load_model
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.stored_form import StoredForm
from tests.finetune.jobs import ALONE, arguments, run_several, series
from tests.finetune.test_preferences import logprobs
from tests.helpers import write_chats
from tests.models_table.cells import Cell
from tests.models_table.engines import ERRORS, Engines, engine_reason, prompts
from tests.models_table.planned import TOLERANCE, compared_with_plan
from tests.models_table.policy import grpo_steps
from tests.small_models.families import config_json, make_model
from tests.training.models.attention.test_samples_alone import differences, packed_logits, samples_of

ROWS = ([7, 40, 90, 3, 21], [5, 9, 11, 2, 1])
"""Lengths of the samples in a row: with windows of 6 and original lengths of 64, and short ones."""
STEPS = 3
DRAWN = {"phimoe": "its routers draw experts at random in training"}
"""Families whose losses have no exact expectation -> why."""
_BF16 = "in bfloat16, up to its rounding: vLLM's CPU build computes these layers in no other type"
ROUNDED = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe"), _BF16),
    "apertus": "in bfloat16, up to its rounding: vLLM keeps parameters of its activation in this type",
}
"""Families whose log-probabilities in vLLM cannot be those of float32 -> why."""
_ROTARY = "vLLM's CPU kernel for rotary embeddings is wrong for the shapes of this family"
WRONG = dict.fromkeys(("lfm2", "lfm2_moe"), _ROTARY)
"""Families that vLLM computes differently on CPUs -> the cause."""


class OtherResultError(Exception):
    """A result that is not the expected one; the message is the reason in the cell."""


class NotTriedError(Exception):
    """A check that cannot run."""


class Trained(NamedTuple):
    """A finished run in this process."""

    losses: list[float]
    expected: float
    """The loss of the first step, sample by sample in transformers."""
    model: CausalLM
    folder: Path


class Tools:
    """What the rows of a process share. Each tool is started when it is needed."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def close(self) -> None:
        """End everything that was started."""
        self._stack.close()

    @cached_property
    def engines(self) -> Engines:
        """Processes with vLLM."""
        return self._stack.enter_context(closing(Engines()))


@dataclass
class Row:
    """A family that is tried. What several columns need is made once."""

    kind: str
    folder: Path
    tools: Tools

    @cached_property
    def path(self) -> Path:
        return make_model(self.folder / "model", self.kind)

    @cached_property
    def only_unpacked(self) -> str:
        """Why the family is trained with trainer.packing=false; empty if its rows are packed."""
        settings = config_json(self.path)
        try:
            refuse_family("model.path", "", settings)
        except UserError as error:
            refuse_family("model.path", "", settings, packing=False)
            return reason_of(error, self)
        return ""

    @property
    def packing(self) -> list[str]:
        return ["trainer.packing=false"] if self.only_unpacked else []

    def loaded(self) -> CausalLM:
        """Load the model with the check that every job makes."""
        trainer_options = TrainingConfig(packing=not self.only_unpacked)
        return load_sharded(causal_lm(ModelConfig(path=str(self.path), dtype="float32")), ALONE, trainer_options)

    @cached_property
    def trained(self) -> Trained:
        """A run of SFT, whose steps all have the same samples."""
        return train(self, "sft", [f"data.train_files={write_chats(self.folder / 'chats.jsonl', 8)}"])

    def options(self) -> list[str]:
        """Return the options of a run that trains on 8 rows in each step, and exports."""
        return [
            *(f"model.path={self.path}", "trainer.device=cpu", f"trainer.total_epochs={STEPS}"),
            *("data.train_batch_size=8", "data.max_length=256", "trainer.micro_tokens=1024", "trainer.logger=[]"),
            *("optim.lr=2e-3", "optim.lr_scheduler=constant", "optim.warmup_ratio=0", "optim.weight_decay=0"),
            *self.packing,
        ]


def train(row: Row, kind: str, options: list[str]) -> Trained:
    """Run training in this process, from loading to the exported model."""
    folder = row.folder / "-".join([kind, str(len(list(row.folder.iterdir())))])
    config, run = parse(["--kind", kind, *arguments(row.options(), folder, *options)])
    state = trainer.load(config, run, ALONE)
    expected = 0.0 if kind != "sft" else plain_loss(transformers_own(row.path), state.data.items)
    with state.tracker, state.saver:
        if trainer.loop(state) != 0:
            raise OtherResultError("the run did not finish")
    assert isinstance(state.model, CausalLM)
    return Trained(series(folder, "train/loss"), expected, state.model.eval(), folder)


def transformers_own(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a model as a user of transformers does."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    try:
        found, info = AutoModelForCausalLM.from_pretrained(path, **options)
    except ValueError:  # no class for text only
        found, info = AutoModelForImageTextToText.from_pretrained(path, **options)
    if info["missing_keys"] or info["mismatched_keys"]:
        raise OtherResultError("transformers finds no values for some weights")
    return found.eval()


@torch.no_grad()
def plain_loss(model: Any, samples: Any) -> float:
    """Return the mean loss of the targets, of each sample alone."""
    found = [logprobs(model, sample) for sample in samples]
    return float(-sum(total for total, _ in found) / sum(count for _, count in found))


@torch.no_grad()
def refuse_other_logits(ours: CausalLM, theirs: Any, limit: float, what: str) -> None:
    """Raise OtherResultError if logits of packed rows are not those of transformers."""
    samples = samples_of(ROWS[0])
    for ids_T, own_TV in zip(samples, packed_logits(ours, samples), strict=True):
        alone_TV = theirs(input_ids=ids_T[None], use_cache=False).logits[0]
        if not torch.allclose(own_TV, alone_TV, atol=limit * float(alone_TV.abs().max()), rtol=0):
            raise OtherResultError(what)


def check_load(row: Row) -> str:
    """Load the model with the check that every job makes."""
    row.loaded()
    return "with trainer.packing=false" if row.only_unpacked else ""


def check_packed(row: Row) -> str:
    """Compare logits, loss and gradient of each sample of a row with those that it has alone."""
    if row.only_unpacked:
        raise OtherResultError(row.only_unpacked)
    model = row.loaded()
    model.hf.eval()  # some routers draw experts in training mode
    plain = transformers_own(row.path)
    for lengths in ROWS:
        if max(differences(model, plain, lengths)) > 1e-4:
            raise OtherResultError("a sample in a row is not what it is alone")
    return ""


def check_sft(row: Row) -> str:
    """Train; the first loss is that of transformers."""
    losses, expected, *_ = row.trained
    _refuse_rising(losses)
    if row.kind in DRAWN:
        return DRAWN[row.kind]
    if not math.isclose(losses[0], expected, rel_tol=1e-4):
        raise OtherResultError("the first loss is not that of transformers")
    return ""


def check_dpo(row: Row) -> str:
    """Train on pairs; the first loss is that of a policy which is its reference."""
    pairs = [
        {"prompt": f"What is {n} plus {n}?", "chosen": f"It is {2 * n}. " + "Yes. " * (n % 4), "rejected": "No idea."}
        for n in range(8)
    ]
    file = row.folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    losses, *_ = train(row, "dpo", [f"data.train_files={file}", "trainer.export=false"])
    if not math.isclose(losses[0], math.log(2), rel_tol=1e-4):
        raise OtherResultError("the first loss is not log 2")
    _refuse_rising(losses)
    return ""


def check_grpo(row: Row) -> str:
    """Make two steps with the engine `hf`; engine and trainer have the same probabilities."""
    for step in grpo_steps(row.path, *row.packing):
        if step.difference > 1e-5:
            raise OtherResultError("engine and trainer have other probabilities")
        if not 0 < step.norm < math.inf:
            raise OtherResultError("no gradient")
    return ""


def check_lora(row: Row) -> str:
    """Train adapters on all linear layers; the exported model has them merged."""
    chats = write_chats(row.folder / "chats.jsonl", 8)
    options = [f"data.train_files={chats}", "model.lora.rank=4", "optim.lr=2e-2"]
    losses, expected, model, folder = train(row, "sft", options)
    if row.kind not in DRAWN and not math.isclose(losses[0], expected, rel_tol=1e-4):
        raise OtherResultError("the first loss is not that of transformers")
    _refuse_rising(losses)
    refuse_other_logits(model, transformers_own(folder / "model"), 1e-4, "the exported model has other logits")
    return ""


def check_resume(row: Row) -> str:
    """Two ranks make one step, and then resume a run of three. One rank has made three without a break; if numbers are
    drawn, two ranks make them, because each draws its own."""
    expected = row.trained.losses
    options = [*row.options(), f"data.train_files={row.folder / 'chats.jsonl'}", "trainer.export=false"]
    run_dir = row.folder / "resumed"
    runs = [(options, run_dir, ["trainer.total_training_steps=1"]), (options, run_dir, [])]
    if row.kind in DRAWN:
        runs.append((options, row.folder / "unbroken", []))
    results = run_several(runs, ranks=2, timeout=300)
    for code, out, errors in results:
        if code != 0 or "exit codes 0 0" not in out:
            raise OtherResultError((errors.strip() or out).splitlines()[-1])
    if row.kind in DRAWN:
        expected = series(row.folder / "unbroken", "train/loss")
    if "resuming after step 1" not in results[0][1]:
        raise OtherResultError("the second run began anew")
    if not np.allclose(series(run_dir, "train/loss"), expected, rtol=1e-3):
        raise OtherResultError("the losses are not those of a run without a break")
    return "compared with two ranks" if row.kind in DRAWN else ""


def check_export(row: Row) -> str:
    """Load the exported model with transformers; its logits are those of the trained one."""
    trained = row.trained
    refuse_other_logits(
        trained.model, transformers_own(trained.folder / "model"), 1e-5, "the exported model has other logits"
    )
    kind = AutoConfig.from_pretrained(trained.folder / "model").model_type
    return "" if kind == row.kind else f"as {kind}"


def check_vllm(row: Row) -> str:
    """Load the exported model with vLLM, then send it other weights; compare log-probabilities with transformers."""
    if find_spec("vllm") is None:
        raise NotTriedError("vLLM is not installed")
    refuse_unserved("model.path", "", config_json(row.path), "vllm")
    model, sent = row.trained.folder / "model", row.folder / "sent.pt"
    dtype = "bfloat16" if row.kind in ROUNDED else "float32"
    hf = load_model(ModelConfig(path=str(row.path)), packing=not row.only_unpacked).hf
    source = WeightSource(hf, getattr(torch, dtype), stored=StoredForm(hf))
    torch.save([(name, weight.detach().clone()) for name, weight in source], sent)
    found = row.tools.engines.try_model(model, sent, row.folder, dtype)
    if "error" in found:
        raise OtherResultError(engine_reason(found))
    first, *later = found["responses"]
    change = _difference(row.path, first)
    limit = change / 5 if row.kind in ROUNDED else 1e-4
    if change < 1e-2:
        raise OtherResultError("training changed too little")
    if _difference(model, first) > limit:
        raise OtherResultError(WRONG.get(row.kind, "other log-probabilities of the exported model"))
    if max(_difference(row.path, each) for each in later) > limit:
        raise OtherResultError("other log-probabilities after new weights")
    return ROUNDED.get(row.kind, "")


@torch.no_grad()
def _difference(path: Path, responses: Sequence[Any]) -> float:
    """Return the mean difference between the log-probabilities of responses and those of transformers."""
    model, found = transformers_own(path), []
    for prompt, (tokens, given) in zip(prompts(), responses, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, np.array(tokens, np.int32)])).long()
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(dim=1)
        found.append(np.abs(np.array(given) - logits.gather(1, ids[len(prompt) :, None])[:, 0].numpy()))
    return float(np.concatenate(found).mean())


def check_plan(row: Row) -> str:
    """Compare the planned memory of a GPU with what a simulated one traces, in a step of SFT."""
    try:
        found = compared_with_plan(row.kind, row.packing)
    except RuntimeError as error:  # of the other process
        raise NotTriedError("the simulation of a GPU fails") from error
    for what, (planned, traced) in found.items():
        if not math.isclose(planned, traced, rel_tol=TOLERANCE):
            raise OtherResultError(f"{what}: too {'little' if planned < traced else 'much'} memory")
    return ""


class Column(NamedTuple):
    """A column of the table."""

    title: str
    check: Callable[[Row], str]
    needs: tuple[str, ...] = ()
    """Columns without which it is not tried."""


COLUMNS = {
    "load": Column("load", check_load),
    "packed": Column("packed = alone", check_packed, ("load",)),
    "sft": Column("SFT", check_sft, ("load",)),
    "dpo": Column("DPO", check_dpo, ("load",)),
    "grpo": Column("GRPO (`hf`)", check_grpo, ("load",)),
    "lora": Column("LoRA", check_lora, ("load",)),
    "resume": Column("resume", check_resume, ("load", "sft")),
    "export": Column("export", check_export, ("load", "sft")),
    "vllm": Column("vLLM", check_vllm, ("load", "sft")),
    "plan": Column("plan", check_plan),
}


_UNKNOWN = Cell("not tried")


def cells_of(row: Row, columns: Sequence[str], known: Mapping[str, Cell]) -> dict[str, Cell]:
    """Try a family.

    Args:
        columns: those that are tried.
        known: cells of other columns, which columns may need.
    """
    found: dict[str, Cell] = {}
    for name, column in COLUMNS.items():
        if name in columns:
            found[name] = _cell(row, column, {**known, **found})
    return found


def _cell(row: Row, column: Column, known: Mapping[str, Cell]) -> Cell:
    if failed := [COLUMNS[need].title for need in column.needs if known.get(need, _UNKNOWN).verdict != "yes"]:
        return Cell("not tried", f"needs {failed[0]}")
    try:
        return Cell("yes", column.check(row))
    except NotTriedError as error:
        return Cell("not tried", str(error))
    except OtherResultError as error:
        return Cell("no", str(error))
    except ERRORS as error:
        return Cell("no", reason_of(error, row))


def reason_of(error: Exception, row: Row) -> str:
    """Return the reason in an error in a few words, without what depends on this run: folders and numbers."""
    text = re.sub(r"\S*" + re.escape(str(row.folder)) + r"\S*:? ?", "", (str(error).strip() or "?").splitlines()[0])
    text = re.sub(r" \((relative differences|in all): [^)]*\)", "", text)
    if isinstance(error, UserError):
        text = re.sub(rf"^(model\.\w+|{row.kind}): |.*models of type \S+ ", "", text)
        return re.split(": |; |, so ", text)[0]
    return f"{type(error).__name__}: {text.partition('. ')[0]}"


def _refuse_rising(losses: list[float]) -> None:
    if not all(math.isfinite(loss) for loss in losses) or losses[-1] >= losses[0]:
        raise OtherResultError("the loss does not fall")
