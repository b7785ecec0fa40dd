"""Check by its signature whether a function can be called as a reward function."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any

from hpc_rl.errors import UserError

EXTRAS = ("row", "prompt")
"""Parameters that a function may have; only a function that has them receives them."""
_OF_TRL = ("completions", "prompts", "completion_ids", "completions_ids", "trainer_state", "queries")
"""Parameters by which TRL passes lists to reward functions."""
_ANSWERS = ("answer", "ground_truth", "reference", "label", "solution", "target")
"""Names of a first parameter that has to be the second one, unless that has such a name too: (solution, answer)."""
EXPECTED = "def score(response: str, answer, **kwargs) -> float"


def extras(signature: Signature) -> list[str]:
    """Return the names in EXTRAS that are parameters of the function."""
    return [name for name in EXTRAS if name in signature.parameters]


def check(spec: str, signature: Signature, kwargs: Mapping[str, Any]) -> None:
    """Check that the function accepts the call that scoring makes.

    Args:
        spec: reward.function, for the error.
        kwargs: reward.kwargs.

    Raises:
        UserError: the parameters do not fit; the message compares them with the call.
    """
    refuse_others(spec, signature)
    given = extras(signature)
    if clash := [name for name in given if name in kwargs]:
        raise UserError(
            f"reward.kwargs.{clash[0]}: the function's parameter {clash[0]} receives the sample's own; remove it from "
            "reward.kwargs, or rename the parameter"
        )
    try:
        signature.bind("", None, **kwargs, **dict.fromkeys(given))
    except TypeError as error:
        call = ", ".join(["response", "answer", *(f"{name}=..." for name in [*kwargs, *given])])
        raise UserError(
            f"reward.function {spec} has the parameters {_bare(signature)}, but is called with ({call}): {error}. "
            f"Define it as {EXPECTED}, and set further arguments in reward.kwargs"
        ) from error


def refuse_others(spec: str, signature: Signature) -> None:
    """Raise UserError if the function would get other values than the names of its parameters mean.

    Functions for TRL and OpenRLHF receive lists by name; others receive the answer before the response.
    """
    found = [name for name in _OF_TRL if name in signature.parameters]
    first, second = [*signature.parameters, "", ""][:2]
    if not found and first in _ANSWERS and second not in _ANSWERS:
        raise UserError(
            f"reward.function {spec} has the parameters {_bare(signature)}, but is called with (response, answer) in "
            f"this order: define it as {EXPECTED}"
        )
    if found:
        raise UserError(
            f"reward.function {spec} has the parameter {found[0]}, as reward functions of TRL and OpenRLHF have: they "
            f"receive lists, and return a list. Here a function scores one response: define it as {EXPECTED} "
            "(docs/from-trl.md)"
        )


def of_parameters(named: Iterable[tuple[str, Any, bool]]) -> Signature:
    """Build a signature from each parameter's name, kind, and whether it has a default."""
    return Signature(
        [Parameter(name, kind, default=... if default else Parameter.empty) for name, kind, default in named]
    )


def _bare(signature: Signature) -> str:
    """Return the signature without types and defaults."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(Signature(parameters))
