"""Direct preference optimisation and its relatives: the mean loss of the pairs, or labelled responses, of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hpc_rl.algorithms import preferences
from hpc_rl.algorithms.preferences import PAIR_LOSSES, Pairs, Strength
from hpc_rl.config.training.preferences import NEEDS_NO_REFERENCE, DpoConfig
from hpc_rl.data import sample_files
from hpc_rl.data.lazy import LazyRows, Sizes
from hpc_rl.data.mismatched import Mismatched
from hpc_rl.data.pairs import Preference, preference_tokenizer
from hpc_rl.data.sample_files import Samples
from hpc_rl.data.tokenized import Tokenize
from hpc_rl.finetune.base import Found, Objective, Work
from hpc_rl.finetune.pair_batch import PairBatch, pack_preferences, response_logprobs
from hpc_rl.finetune.reference import Reference, load_reference, with_ref_logprobs
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import reshard
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Referenced(Objective):
    """An objective that compares the policy with a reference."""

    config: DpoConfig
    _reference: Reference | None = None
    """Held if its log-probabilities are computed in each step."""
    _policy: CausalLM | None = None
    """Held between `prepare` and `load`, if the reference is the policy without its adapters."""

    form: Samples[Preference] = sample_files.preferences(2, 1)

    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Tokenize:
        """Return the function that tokenizes preferences."""
        return preference_tokenizer(self.untemplated_data, tokenizer)

    def model(self) -> Pretrained[CausalLM]:
        """Return the policy, without dropout: it is compared with a reference that has none."""
        return causal_lm(self.config.model, dropout=False)

    def load(self, world: World) -> CausalLM:
        """Return the policy, which may have been loaded for the reference."""
        policy, self._policy = self._policy, None
        return super().load(world) if policy is None else policy

    def prepare(
        self,
        train: Sequence[Preference],
        val: Sequence[Preference],
        sizes: Sizes,
        run: RunDir,
        world: World,
        stopping: Stopping,
    ) -> tuple[Sequence[Preference], Sequence[Preference]]:
        """Load the reference; add its log-probabilities to the preferences, unless they are computed in each step."""
        if self.config.algorithm.loss in NEEDS_NO_REFERENCE:
            return train, val
        if not self.config.ref.precompute_logprobs:
            self._reference = Reference(self._reference_model(world))
            return train, val
        load = partial(self._reference_model, world)
        return with_ref_logprobs(self.config, train, val, sizes, load, run, world, stopping)

    def _reference_model(self, world: World) -> CausalLM:
        """Load the reference: the policy, of which it is the part without adapters, or a frozen model."""
        if not self.config.model.lora.is_used or self.config.ref.path is not None:
            return load_reference(self.config, world)
        self._policy = super().load(world)
        return self._policy

    def ref_logprobs(self, batch: PairBatch) -> torch.Tensor:
        """Return the reference's log-probabilities of a micro-batch's samples, [P, W]."""
        return batch.ref_PW if self._reference is None else self._reference.logprobs(batch)


class Dpo(_Referenced):
    """Prefer the chosen response of each pair."""

    def collate(self, items: Sequence[Preference]) -> PairBatch:
        """Build a micro-batch."""
        return pack_preferences(items, width=2)

    def loss(self, model: CausalLM, batch: PairBatch, scale: float) -> Found:
        """Return `scale` times the sum of the pairs' losses."""
        settings = self.config.algorithm
        strength = Strength(settings.beta, settings.label_smoothing, settings.gamma)
        # The reference comes first: it may be the policy, whose converted weights are released after this pass.
        known_PW = None if settings.loss in NEEDS_NO_REFERENCE else self.ref_logprobs(batch)
        logprobs_PW = response_logprobs(model, batch)
        ref_PW = torch.zeros_like(logprobs_PW) if known_PW is None else known_PW
        pairs = Pairs(*logprobs_PW.T, *ref_PW.T, *batch.tokens_PW.T)
        loss_P = PAIR_LOSSES[settings.loss](pairs, strength) - settings.sft_coeff * pairs.chosen_mean_P
        with torch.no_grad():
            chosen_P, rejected_P = preferences.rewards(settings.loss, pairs, strength)
            right_P = (chosen_P > rejected_P).float()
            columns = [right_P, chosen_P - rejected_P, chosen_P, rejected_P, pairs.chosen_P, pairs.rejected_P]
            sums = torch.stack([torch.ones_like(right_P), *columns]).sum(dim=1)
        return Found(scale * loss_P.sum(), sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean of each column over all pairs."""
        names = ("accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")
        count, *totals = sums
        return {name: total / count for name, total in zip(names, totals, strict=True)}


@dataclass(frozen=True)
class KtoBatch:
    """A micro-batch of labelled responses."""

    own: PairBatch
    mismatched: PairBatch
    """The same prompts with other responses, for the baseline."""

    def to(self, device: torch.device) -> KtoBatch:
        """Return a copy on the device."""
        return KtoBatch(self.own.to(device), self.mismatched.to(device))


class Kto(_Referenced):
    """Make responses with a true label more probable, and the others less."""

    form = sample_files.preferences(1, 1)

    def __init__(self, config: DpoConfig) -> None:
        super().__init__(config)
        self._baseline = torch.zeros(())

    def items(self, rows: LazyRows[Preference]) -> Sequence[Preference]:
        """Return the labelled responses, each with a mismatched one."""
        return Mismatched(rows, self.config.data.max_length)

    def collate(self, items: Sequence[Preference]) -> KtoBatch:
        """Build a micro-batch."""
        return KtoBatch(pack_preferences(items, width=1), pack_preferences(items, width=1, first=1))

    def work(self, sizes: Sizes) -> Work:
        """Count the tokens of a global batch. The mismatched samples are packed with it, and not trained on."""
        return Work.of(sizes, trained=1)

    @torch.no_grad()
    def begin(self, model: CausalLM, batches: Iterable[KtoBatch], world: World) -> None:
        """Estimate the divergence from the reference, which all losses of a global batch use."""
        total, count = torch.zeros((), device=world.device), 0
        for batch in batches:
            there = batch.mismatched.to(world.device)
            total += (response_logprobs(model, there) - self.ref_logprobs(there)).sum()
            count += len(there.values_PK)
            heart.beat()
        reshard(model)
        by_group = world.gather_rows([total.item(), count])[:: self.config.trainer.sequence_parallel]
        total, count = by_group.sum(dim=0).tolist()
        self._baseline = torch.tensor(max(0.0, total / count), device=world.device)

    def loss(self, model: CausalLM, batch: KtoBatch, scale: float) -> Found:
        """Return `scale` times the sum of the responses' losses."""
        settings, own = self.config.algorithm, batch.own
        ref_P = self.ref_logprobs(own)[:, 0]  # first, as in Dpo.loss
        logprob_P = response_logprobs(model, own)[:, 0]
        ratio_P = logprob_P - ref_P
        good_P, weights = own.values_PK[:, 0] > 0, (settings.desirable_weight, settings.undesirable_weight)
        loss_P = preferences.kto(ratio_P, good_P, self._baseline, settings.beta, weights)
        loss_P = loss_P - settings.sft_coeff * good_P * logprob_P / own.tokens_PW[:, 0].clamp(min=1)
        with torch.no_grad():
            right_P = (ratio_P > self._baseline) == good_P
            columns = [right_P.float(), torch.ones_like(ratio_P), settings.beta * ratio_P, logprob_P]
            sums = torch.cat([(torch.stack(columns) * mask_P).sum(dim=1) for mask_P in (good_P, ~good_P)])
        return Found(scale * loss_P.sum(), sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return means over all responses, and over those with a true and with a false label if there are any."""
        found: dict[str, Any] = {"accuracy": (sums[0] + sums[4]) / (sums[1] + sums[5]), "kl": self._baseline.item()}
        for name, (_, count, reward, logprob) in {"chosen": sums[:4], "rejected": sums[4:]}.items():
            if count:
                found |= {f"reward_{name}": reward / count, f"logp_{name}": logprob / count}
        if "reward_chosen" in found and "reward_rejected" in found:
            found["margin"] = found["reward_chosen"] - found["reward_rejected"]
        return found
