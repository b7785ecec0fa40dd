"""Runs a program as its own launcher would, in a rank of a job: with the variables and options it adds.

    python -m hpc_rl.adapters.inside.launched accelerate --config_file fsdp.yaml -- train.py --lr 1e-4

The values come from the launcher's own code where it has any, because they change with its version.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hpc_rl.errors import EXIT_BAD_INPUT

_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
Started = tuple[Mapping[str, str], Sequence[str]]
"""Variables, and the words of the program."""


def accelerate(options: Sequence[str], program: Sequence[str]) -> Started:
    """Return what `accelerate launch` sets for a program: mixed precision, FSDP, DeepSpeed, parallelism.

    Raises:
        ValueError: the options or their file are wrong.
    """
    launch: Any = import_module("accelerate.commands.launch")
    variables: Any = import_module("accelerate.utils.launch")
    is_module = program[0] == "-m"
    words = [*options, *(["--module"] if is_module else []), *(program[1:] if is_module else program)]
    args: Any = launch.launch_command_parser().parse_args(words)
    args.num_processes, args.num_machines = int(os.environ["WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    args.machine_rank, args.main_process_ip = int(os.environ["GROUP_RANK"]), os.environ["MASTER_ADDR"]
    args.main_process_port = 0  # it opens none
    args.multi_gpu = args.multi_gpu and args.num_processes > 1
    args, defaults, is_precision_of_file = launch._validate_launch_command(args)
    if args.use_deepspeed and not args.cpu:
        fields = list(defaults.deepspeed_config) if defaults else []
        args.deepspeed_fields_from_accelerate_config = ",".join(
            [*fields, *(["mixed_precision"] if is_precision_of_file else [])]
        )
        found = variables.prepare_deepspeed_cmd_env(args)[1]
    else:
        found = variables.prepare_multi_gpu_env(args)
    if args.cpu or args.use_cpu:
        found["ACCELERATE_USE_CPU"] = "True"
    return {name: value for name, value in found.items() if name.startswith(_PREFIXES)}, program


def trl(options: Sequence[str], program: Sequence[str]) -> Started:
    """Return what `trl NAME` sets: accelerate's variables, by the name or the path of a configuration."""
    if options and not Path(options[0]).is_file():
        spec = importlib.util.find_spec("trl")
        folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
        file = folder / "accelerate_configs" / f"{options[0]}.yaml"
        if not file.is_file():
            raise ValueError(f"--accelerate_config {options[0]}: neither a file nor a configuration of TRL")
        options = [str(file)]
    return accelerate([word for file in options for word in ("--config_file", file)], program)


def deepspeed(options: Sequence[str], program: Sequence[str]) -> Started:
    """Return what the `deepspeed` command adds: its ranks have an argument of their own."""
    end = 2 if program[0] == "-m" else 1
    own = [] if "--no_local_rank" in options else [f"--local_rank={os.environ['LOCAL_RANK']}"]
    return {}, [*program[:end], *own, *program[end:]]


def fabric(options: Sequence[str], program: Sequence[str]) -> Started:
    """Return what `fabric run` sets: the options of Fabric() in the program."""
    parser = ArgumentParser(prog="fabric run", add_help=False)
    for name in ("accelerator", "strategy", "precision"):
        parser.add_argument(f"--{name}")
    given = {f"LT_{name.upper()}": value for name, value in vars(parser.parse_known_args(options)[0]).items() if value}
    size = {"LT_DEVICES": os.environ["LOCAL_WORLD_SIZE"], "LT_NUM_NODES": os.environ["GROUP_WORLD_SIZE"]}
    return {"LT_CLI_USED": "1", **size, **given}, program


def swift(_options: Sequence[str], program: Sequence[str]) -> Started:
    """Return the arguments that `swift NAME` makes of a settings file, and its variables."""
    before = dict(os.environ)
    for name in ("NPROC_PER_NODE", "NNODES"):  # with these, it starts torchrun
        os.environ.pop(name, None)
    arguments = list(program[2:])
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        import_module("swift.cli.main").parse_yaml_args(arguments)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}, [*program[:2], *arguments]


BY_NAME: Mapping[str, Callable[[Sequence[str], Sequence[str]], Started]] = {
    function.__name__: function for function in (accelerate, trl, deepspeed, fabric, swift)
}


def main(words: Sequence[str]) -> None:
    """Become the program, in this process."""
    launcher, end = words[0], words.index("--")
    try:
        variables, program = BY_NAME[launcher](words[1:end], words[end + 1 :])
    except ValueError as error:
        print(f"{launcher}: {error}", flush=True)
        raise SystemExit(EXIT_BAD_INPUT) from error
    os.execve(sys.executable, [sys.executable, "-u", *program], {**os.environ, **variables})


if __name__ == "__main__":
    main(sys.argv[1:])
