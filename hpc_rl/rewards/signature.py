"""Whether a function can be called as a reward function, from its signature alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any

from hpc_rl.errors import UserError

EXTRAS = ("row", "prompt")
"""Parameters that are given to a function that has them."""
EXPECTED = "def score(response: str, answer, **kwargs) -> float"


def extras(signature: Signature) -> list[str]:
    """Which of EXTRAS the function has as a parameter of its own."""
    return [name for name in EXTRAS if name in signature.parameters]


def check(spec: str, signature: Signature, kwargs: Mapping[str, Any]) -> None:
    """Try the call that scoring makes.

    Args:
        spec: reward.function, for the error.
        kwargs: reward.kwargs.

    Raises:
        UserError: the call would not fit, with what is expected and what was found.
    """
    given = extras(signature)
    if clash := [name for name in given if name in kwargs]:
        raise UserError(f"reward.kwargs.{clash[0]}: a parameter of this name gets the sample's own {clash[0]}")
    try:
        signature.bind("", None, **kwargs, **dict.fromkeys(given))
    except TypeError as error:
        call = ", ".join(["response", "answer", *(f"{name}=..." for name in [*kwargs, *given])])
        raise UserError(
            f"reward.function {spec} has the parameters {_bare(signature)} and is called with ({call}): {error}; "
            f"write it as {EXPECTED}, and give further arguments in reward.kwargs"
        ) from error


def of_parameters(named: Iterable[tuple[str, Any, bool]]) -> Signature:
    """A signature from name, kind and whether there is a default of each parameter."""
    return Signature(
        [Parameter(name, kind, default=... if default else Parameter.empty) for name, kind, default in named]
    )


def _bare(signature: Signature) -> str:
    """Names alone, without types and defaults."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(Signature(parameters))
