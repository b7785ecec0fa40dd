"""Checks of the user's code: rewards, environments and tools, their imports, and what the template shows of tools."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

from hpc_rl.config.rl.environment import SHIPPED_TOOLS, EnvironmentConfig
from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.config.rl.reward import OptionalRewardConfig
from hpc_rl.config.training.common import ModelSource
from hpc_rl.data.templates.jinja_rendering import read_template, stored_template
from hpc_rl.environments.loading import ENVIRONMENT, TOOLS, check_name
from hpc_rl.environments.protocol import OWN_METHODS
from hpc_rl.environments.tool_calls import guess_format
from hpc_rl.errors import UserError
from hpc_rl.rewards.check import check_function
from hpc_rl.rewards.table import REWARDS
from hpc_rl.software import user_code
from hpc_rl.submission.hub import HubCache
from hpc_rl.submission.preflight.model import model_folder
from hpc_rl.submission.preflight.program import check_packages


def user_names(reward: OptionalRewardConfig, environment: EnvironmentConfig) -> Iterator[tuple[str, str]]:
    """Yield option and value for each name of the user's code."""
    for each in reward.each_function():
        if each.function is not None and each.function not in REWARDS:
            yield "reward.function", each.function
    if environment.name is not None:
        yield ENVIRONMENT, environment.name
    for tool in environment.tools:
        if tool not in SHIPPED_TOOLS:
            yield TOOLS, tool


def check_reward(reward: OptionalRewardConfig, same_python: bool) -> str | None:
    """Check that a reward function exists and can be called as one; see `check_function`."""
    assert reward.function is not None
    return check_function(reward.function, reward.kwargs, same_python=same_python)


def check_environment_name(option: str, name: str, same_python: bool) -> str | None:
    """Check that an environment or a tool exists; see `check_name`."""
    return check_name(option, name, same_python=same_python)


def check_imports(option: str, name: str, python: str | None) -> str | None:
    """Check that the job's Python has the packages that the user's code imports when it is loaded.

    Args:
        python: slurm.python, or None for the Python that runs hpc-rl.

    Returns:
        Why it could not be checked, if so.

    Raises:
        UserError: packages are missing.
    """
    source = _source(option, name)
    needed = user_code.imported_packages(source) if source is not None else []
    return check_packages(python, needed, f"{option} {name}", extra=None) if needed else None


def check_tools(environment: EnvironmentConfig, model: ModelSource, data: PromptConfig, cache: HubCache) -> None:
    """Raise UserError if the model is to call tools, and its chat template shows it none."""
    if environment.tool_format != "auto" or not (environment.tools or _has_tools(environment.name)):
        return
    folder = model_folder(model.tokenizer_path or model.path, cache)
    template = None
    if data.chat_template is not None:
        file = Path(data.chat_template)
        template = read_template(file) if file.is_file() else None
    elif folder is not None:
        template = stored_template(folder)
    if template is not None:
        guess_format(template)


def _has_tools(name: str | None) -> bool:
    """Return whether an environment is a class with public methods of its own, which are tools, as far as its source
    shows it."""
    source = _source(ENVIRONMENT, name) if name is not None else None
    if name is None or source is None:
        return False
    with contextlib.suppress(UserError):  # the check of the name reports it
        found = user_code.find_statement(name, source, name.rpartition(":")[2])
        methods = (
            [node.name for node in found.body if isinstance(node, ast.FunctionDef)]
            if isinstance(found, ast.ClassDef)
            else []
        )
        return any(not method.startswith("_") and method not in OWN_METHODS for method in methods)
    return False


def _source(option: str, name: str) -> Path | None:
    """Return the source of the user's code, if it is here; the check of the name reports what is wrong with it."""
    location = user_code.read_location(name)
    if location is None:
        return None
    with contextlib.suppress(UserError):
        return user_code.find_source(option, location, same_python=False)
    return None
