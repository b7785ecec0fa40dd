"""Divergences between the teacher's and the student's distribution of the next token, for distillation.

Each function takes the log-probabilities of both, [C, V], and returns one value per position, [C], in nats; it is never
negative, and 0 where both are equal. C positions, V tokens of the vocabulary. A distribution over the teacher's K most
probable tokens has one more outcome for all the others (`top_k_logprobs`), so that it is one too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def forward_kl(teacher_CV: torch.Tensor, student_CV: torch.Tensor, _weight: float) -> torch.Tensor:
    """Return KL(teacher || student): the student covers all that the teacher may write (Hinton et al. 2015,
    https://arxiv.org/abs/1503.02531)."""
    return _kl(teacher_CV, student_CV)


def reverse_kl(teacher_CV: torch.Tensor, student_CV: torch.Tensor, _weight: float) -> torch.Tensor:
    """Return KL(student || teacher): the student avoids what the teacher would not write (MiniLLM, Gu et al. 2024,
    https://arxiv.org/abs/2306.08543)."""
    return _kl(student_CV, teacher_CV)


def jensen_shannon(teacher_CV: torch.Tensor, student_CV: torch.Tensor, weight: float) -> torch.Tensor:
    """Return w KL(teacher || m) + (1 - w) KL(student || m) with the mixture m = w teacher + (1 - w) student, the
    generalised Jensen-Shannon divergence (GKD, Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, eq. 1).

    Args:
        weight: w, between 0 and 1. Divided by w, the divergence tends to the forward KL as w goes to 0; divided by
            1 - w, to the reverse KL as w goes to 1.
    """
    mixture_CV = torch.logaddexp(teacher_CV + math.log(weight), student_CV + math.log1p(-weight))
    return weight * _kl(teacher_CV, mixture_CV) + (1 - weight) * _kl(student_CV, mixture_CV)


def top_k_logprobs(logprobs_CV: torch.Tensor, ids_CK: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of K tokens and, as the last outcome, of all the others together: [C, K + 1].

    Args:
        ids_CK: different tokens at each position, int64; K is less than V.
    """
    others_C = logprobs_CV.scatter(1, ids_CK, -torch.inf).logsumexp(dim=1)
    return torch.cat([logprobs_CV.gather(1, ids_CK), others_C[:, None]], dim=1)


def _kl(p_CV: torch.Tensor, q_CV: torch.Tensor) -> torch.Tensor:
    return (p_CV.exp() * (p_CV - q_CV)).sum(dim=1)


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "js": jensen_shannon,
}
"""algorithm.divergence -> (teacher's log-probabilities, student's, weight) -> divergence. The names are also listed in
hpc_rl/config/training/distill.py, which is imported without torch; a test compares both."""
