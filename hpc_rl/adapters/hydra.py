"""Programs whose options are `key=value`: what the user gave, on the command line or in a file."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_rl.adapters.adapter import ProgramPlace
from hpc_rl.adapters.program import Program
from hpc_rl.formats.counted import counted


def given(program: Program) -> Mapping[str, str]:
    """Return the options on the command line, and those of --config, or of Hydra's --config-path and --config-name."""
    options = program.options
    found = [program.settings("config")]
    if name := options.get("config_name"):
        folder = program.folder / options.get("config_path", "")
        found.append(program.read(folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")))
    return {key: value for settings in (*found, options) for key, value in settings.items()}


def appended(own: Mapping[str, str], wanted: Mapping[str, object], prefix: str = "++") -> list[str]:
    """Return the options that the user has not given.

    Args:
        own: what the user has given.
        prefix: Hydra's, with which an option is accepted whether or not this version has it.
    """
    return [f"{prefix}{name}={value}" for name, value in wanted.items() if name not in own]


def size_conflicts(own: Mapping[str, str], place: ProgramPlace, nodes: str, gpus: str) -> list[str]:
    """Return a sentence for each of these two options that is not the job's number.

    Args:
        nodes: option with the number of nodes.
        gpus: option with the number of GPUs of each node.
    """
    rows = ((nodes, place.nodes, "node", "--nodes"), (gpus, place.processes, "GPU", "--gpus-per-node"))
    return [
        f"{name}={own[name]}, but the job has {counted(found, what)}{' per node' if what == 'GPU' else ''}: leave the "
        f"option out, and hpc-rl sets it to the job's number, or submit with {option} {own[name]}"
        for name, found, what, option in rows
        if own.get(name, "").isdecimal() and int(own[name]) != found
    ]
