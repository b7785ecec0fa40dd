"""What makes two tokenizers different: the numbers of tokens, and the tokens with a special role."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_rl.formats.counted import counted

ROLES = ("bos_token", "eos_token", "unk_token")
"""Special tokens that a text can contain or end with. Padding is not among them: training pads nothing."""


def vocabulary_difference(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str | None:
    """Return how many tokens differ, and the first one with both numbers; None if the vocabularies are equal."""
    either = theirs.keys() | ours.keys()
    different = sorted((ours.get(token, -1), token) for token in either if theirs.get(token) != ours.get(token))
    if not different:
        return None
    token = different[0][1]
    differ = "differs" if len(different) == 1 else "differ"
    return (
        f"{counted(len(different), 'token')} {differ}, for example {token!r}, which is "
        f"{theirs.get(token, 'missing')} and {ours.get(token, 'missing')}"
    )


def role_difference(theirs: Mapping[str, str | None], ours: Mapping[str, str | None]) -> str | None:
    """Return the first role that different tokens have, with both; None if there is none.

    Args:
        theirs: role -> token; None if the tokenizer has no such token. Only roles that both name are compared.
    """
    for role in ROLES:
        if role in theirs and role in ours and theirs[role] != ours[role]:
            return f"{role} is {theirs[role]!r} and {ours[role]!r}"
    return None


def other_special_tokens(key: str, path: str, model: str, difference: str) -> str:
    """Return the error for a model with other special tokens than the one that is trained.

    Args:
        key: the option that names `path`.
        difference: from `role_difference`.
    """
    return (
        f"{key} {path} and model.path {model} have different special tokens: {difference}; choose a model of the same "
        f"family, or train with this tokenizer: model.tokenizer_path={path}"
    )
