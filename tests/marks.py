"""Marks of tests, and of single cases of a parametrized test."""

from importlib.metadata import version
from typing import Any

import pytest

IS_TRANSFORMERS_4 = version("transformers").startswith("4.")
since_5 = pytest.mark.skipif(IS_TRANSFORMERS_4, reason="transformers 4 has other experts, routers and configurations")


def long(*values: Any) -> Any:
    """A case that only `make test-long` runs: it varies what the other cases cover."""
    return pytest.param(*values, marks=pytest.mark.long)


def unless_4(*values: Any) -> Any:
    """A case that transformers 4 does not have."""
    return pytest.param(*values, marks=since_5)
