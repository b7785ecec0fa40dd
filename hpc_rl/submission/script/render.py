"""From a configuration to the text of a job script. Pure functions, except for reading the template."""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpc_rl import __version__
from hpc_rl.adapters.table import GENERIC, description
from hpc_rl.config.job import JobConfig
from hpc_rl.config.lend import LendConfig
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.config.training.common import RecordedConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.offer import LENT
from hpc_rl.images import run_options
from hpc_rl.images.runtimes import runtime_of
from hpc_rl.liveness.walltime import EARLY_S
from hpc_rl.software.bounds import cpu_seconds
from hpc_rl.software.secrets import refuse_secrets
from hpc_rl.software.shipped import shipped
from hpc_rl.submission.job import Job
from hpc_rl.submission.resources import further_directives, resource_directives
from hpc_rl.submission.script.environment import job_environment
from hpc_rl.submission.script.setup_lines import statements
from hpc_rl.system.files import read_regular, write_atomically
from hpc_rl.system.ownership import refuse_foreign

SUPPORT_PARTS = ("begin", "setup", "step", "requeue")
"""Files of slurm_templates of which support.sh is made, in their order."""
RENDER_S = 60.0
"""CPU time for a script, which usually takes a few milliseconds."""


def render(job: Job) -> str:
    """Return the sbatch script of a job.

    A template of the same name in `./slurm_templates/` or `~/.config/hpc-rl/slurm_templates/` replaces the shipped one.

    Raises:
        UserError: the template is invalid (the message names file and line), or a script cannot contain a path.
    """
    words = {f"the word {number} of the program": word for number, word in enumerate(job.program, 1)}
    refuse_secrets(words | {"the command line": " ".join(job.command)})
    return fill(job.row.template, _values(job))


def support_text() -> str:
    """Return support.sh, the functions of bash that every job script finds in its run directory."""
    return "".join((shipped("slurm_templates") / f"support_{part}.sh").read_text() for part in SUPPORT_PARTS)


def write_support(script: str, path: Path) -> None:
    """Write support.sh, the file of functions for a job script, or keep the one that was written for it.

    Raises:
        UserError: another version of hpc-rl has rendered the script, and its file is not there any more.
    """
    text = support_text()
    wanted = _SUPPORT_SUM.search(script)
    if wanted is None and (path.is_file() or path.name not in script):
        return  # the script of a template or a version that does not compare, or needs no such file
    if wanted is None or wanted[1] == _sum(text):
        write_atomically(path, text, forbidden=0o022)
        return
    try:
        found = read_regular(path)
    except OSError:
        found = b""
    if _sum(found.decode(errors="replace")) != wanted[1]:
        raise UserError(
            f"the job script was rendered by another version of hpc-rl, and {path} is not that version's file: render "
            "the script again (hpc-rl render), and repeat your edits"
        )


def has_own_settings(script: str) -> bool:
    """Return whether a script of an earlier version contains the options of its job, which replace config.yaml."""
    return "\nwrite_config <<" in script


_SUPPORT_SUM = re.compile(r"sha256sum\)\" != '([0-9a-f]{64})  -'")


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def render_container(job: Job) -> str:
    """Return container.sh, the part of the job script that runs a command inside the image.

    Raises:
        UserError: see `render`.
    """
    config, settings = job.config, job.config.container
    binds = run_options.job_binds(config, job.run_dir.path, job.working_dir, job.program)
    values = {
        "image": run_options.image_location(settings),
        "runtime": runtime_of(settings),
        "options": runtime_of(settings).options(config, job.working_dir, binds),
        "caches": run_options.CACHES,
        "tokenized": run_options.tokenized_folder(config, job.run_dir, job.working_dir),
        "passed": run_options.passed_names(config),
        "unpacks": run_options.unpacks(config),
        "always_unpacks": settings.unpack == "always",
    }
    return fill("container.sh.j2", values)


def fill(template: str, values: dict[str, Any]) -> str:
    """Fill in a template.

    Raises:
        UserError: the template is invalid; the message names file and line.
    """
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.loaders import FunctionLoader
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        loader=FunctionLoader(_template),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(bash=bash_word, directive=directive_word, comment=_printable)
    try:
        with cpu_seconds(RENDER_S, "it"):
            return environment.get_template(template).render(values)
    except TemplateSyntaxError as error:
        raise UserError(f"template {error.filename or template}, line {error.lineno}: {error.message}") from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"template {_template_line(error, template)}: {error}") from error


def _template(name: str) -> tuple[str, str, Callable[[], bool]] | None:
    """Return the text and the file of a template, for Jinja2. A template of another user is refused."""
    shipped_one = shipped("slurm_templates") / name
    for folder in (Path("slurm_templates"), Path("~/.config/hpc-rl/slurm_templates").expanduser()):
        if (own := folder / name).is_file() and not (shipped_one.is_file() and own.samefile(shipped_one)):
            refuse_foreign(f"template {own}", own)
            return own.read_text(), str(own), lambda: True
    return (shipped_one.read_text(), str(shipped_one), lambda: True) if shipped_one.is_file() else None


def bash_word(text: str) -> str:
    """Quote a text as one word of bash, on one line (bash(1), QUOTING)."""
    if _RESERVED.fullmatch(text):
        return f"'{text}'"
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return "$'" + "".join(escapes.get(c) or (f"\\{ord(c):03o}" if _CONTROL.match(c) else c) for c in text) + "'"


def directive_word(value: str | int) -> str:
    """Quote the value of an #SBATCH line. sbatch reads double quotes, and backslashes before a quote or a backslash.

    Raises:
        UserError: the value has a line break or another control character, which no directive can contain.
    """
    text = str(value)
    if _CONTROL.search(text):
        raise UserError(f"{text!r} has a line break or control character, which an #SBATCH line cannot contain")
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./&|*-]+", text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_RESERVED = re.compile("if|then|else|elif|fi|case|esac|for|select|while|until|do|done|in|function|time|coproc|=.*")


def _values(job: Job) -> dict[str, Any]:
    config = job.config
    has_image = config.container.image is not None
    inside = run_options.has_container_script(config.container)
    container_text = render_container(job).rstrip() if inside else None
    return {
        "title": f"{job.name}: {job.kind} on {job.size}, rendered by hpc-rl {__version__}.",
        "login_shell": config.slurm.login_shell,
        "directives": [found for found in _directives(job) if found[0] not in config.slurm.leave_out],
        "run_dir": str(job.run_dir.path),
        "python": job_python(config),
        "image": run_options.image_location(config.container) if has_image else None,
        "container": container_text,
        "container_end": _end_mark(container_text),
        "inside": 'bash "$HPC_RL_ATTEMPT_DIR/container.sh" ' if inside else "",
        "srun_options": _srun_options(job) if has_image else "",
        "working_dir": str(job.working_dir),
        "modules": config.slurm.modules,
        "module_paths": config.slurm.module_paths,
        "uses_modules": _uses_modules(config.slurm),
        "setup": statements(tuple(config.slurm.setup)),
        "env": sorted(job_environment(config).items()),
        "epilogue": config.slurm.epilogue,
        "has_config": job.row.trainer is not None,
        "warning_s": config.slurm.warning_s,
        "early_s": EARLY_S,
        "start_timeout": _start_timeout(job),
        "start_timeout_key": _start_timeout_of(config)[0],
        "requeue": config.slurm.requeue,
        "max_node_failures": config.slurm.max_node_failures,
        "support_sum": _sum(support_text()),
        "node_options": " ".join(map(bash_word, node_options(job))),
        "program": program_text(job),
        "adapted": description(job.adapter, job.adapted) if job.adapter is not GENERIC else "",
    }


def _start_timeout_of(config: JobConfig) -> tuple[str, int]:
    """Return the option that limits how long nodes take to start, and its value."""
    if isinstance(config, RayJobConfig):
        return "ray.start_timeout_s", config.ray.start_timeout_s
    return "slurm.start_timeout_s", config.slurm.start_timeout_s


def _start_timeout(job: Job) -> int | None:
    """Return the limit for the first task; None if tasks leave no sign: a plug-in of srun may still import an image."""
    container = job.config.container
    leaves_signs = job.kind != "doctor" and (container.image is None or run_options.has_container_script(container))
    return _start_timeout_of(job.config)[1] if leaves_signs else None


def _uses_modules(slurm: SlurmConfig) -> bool:
    return bool(slurm.modules or slurm.module_paths) or bool(re.search(r"\b(module|ml)\s", "\n".join(slurm.setup)))


def job_python(config: JobConfig) -> str:
    """Return the Python of the job, which is inside the image if there is one."""
    return config.container.python if config.container.image else config.slurm.python or sys.executable


def _srun_options(job: Job) -> str:
    srun_options = runtime_of(job.config.container).srun_options
    if srun_options is None:
        return ""
    binds = run_options.job_binds(job.config, job.run_dir.path, job.working_dir, job.program)
    options = srun_options(job.config, run_options.image_location(job.config.container), job.working_dir, binds)
    return "".join(f" \\\n  {bash_word(option)}" for option in options)


def _end_mark(text: str | None) -> str:
    """Return a line that ends a here-document and does not occur in it."""
    return f"END_OF_CONTAINER_{_sum(text or '')[:8]}"


def node_options(job: Job, local: bool = False) -> list[str]:
    """Return the arguments of the node entry.

    Args:
        local: all nodes are this machine, which may lack the cluster's network.
    """
    config = job.config
    _, timeout = _start_timeout_of(config)
    options = ["--processes", str(config.trainer.n_gpus_per_node), "--device", config.trainer.computes_on]
    options += ["--start-timeout", str(timeout)]
    if config.hang_timeout_s and (isinstance(config.trainer, RecordedConfig) or job.adapter.has_heartbeats):
        options += ["--hang-timeout", f"{config.hang_timeout_s:g}"]
    if job.adapter is not GENERIC:
        options += ["--adapter", job.adapter.name, "--warning", str(config.slurm.warning_s)]
    if config.slurm.interface and not local:
        options += ["--interface", config.slurm.interface]
    if isinstance(config, LendConfig):
        options += ["--wait", str(config.lend.wait_s)]
        options += ["--engine-package", config.lend.engine_package] if config.lend.engine_package else []
        options += [] if config.lend.resource == LENT else ["--resource", config.lend.resource]
    if isinstance(config, PpoConfig) and config.rollout.engines == "lent":
        options.append("--joinable")
    return options + (_ray_options(config) if isinstance(config, RayJobConfig) else [])


def _ray_options(config: RayJobConfig) -> list[str]:
    values = {
        "--num-cpus": config.ray_kwargs.num_cpus,
        "--object-store-bytes": config.ray.object_store_bytes,
        "--first-port": config.ray.first_port,
        "--timeline": config.ray_kwargs.timeline_json_file,
    }
    options = [word for name, value in values.items() if value is not None for word in (name, str(value))]
    return options + (["--dashboard"] if config.ray.dashboard else [])


def program_text(job: Job) -> str:
    if job.row.trainer is not None:
        python = "" if job.row.node_entry == "hpc_rl.node.torchrun" else '"$python" '  # torchrun adds its own
        # -P: a datasets.py in the user's folder must not shadow the library of that name.
        return f'{python}-P {" ".join(job.row.trainer_command)} --config "$HPC_RL_ATTEMPT_DIR/config.yaml"'
    return " ".join(map(bash_word, job.program))


def _directives(job: Job) -> Iterator[tuple[str, str | int | None]]:
    slurm, trainer = job.config.slurm, job.config.trainer
    yield "job-name", job.name
    yield "nodes", trainer.nnodes
    resources = list(resource_directives(job.config))
    if slurm.task_option != "ntasks":
        yield "ntasks-per-node", 1
    if slurm.task_option != "ntasks-per-node" and "ntasks" not in dict(resources):
        yield "ntasks", trainer.nnodes
    yield from resources
    for option in ("time", "partition", "account", "qos", "constraint"):
        value = getattr(slurm, option)
        if value is not None:
            yield option, value
    yield from further_directives(slurm)
    yield "output", f"{log_folder(job.run_dir.path)}/job-%j.log"
    yield "open-mode", "append"
    yield "signal", f"B:USR2@{slurm.warning_s}"
    yield ("requeue" if slurm.requeue else "no-requeue"), None


def log_folder(path: Path) -> str:
    """Escape a path for a filename pattern: %% is a percent sign; a backslash would disable patterns (sbatch(1)).

    Raises:
        UserError: the path has a backslash.
    """
    if "\\" in str(path):
        raise UserError(
            f"run directory {path}: sbatch does not accept a backslash in the path of a log; choose another --run-dir"
        )
    return str(path).replace("%", "%%")


def _printable(text: str) -> str:
    return _CONTROL.sub("?", text)


def _template_line(error: Exception, template: str) -> str:
    """Return file and line in the template: those of the innermost frame that Jinja2 mapped to a template."""
    place = template
    trace = error.__traceback__
    while trace:
        filename = trace.tb_frame.f_code.co_filename
        if filename.endswith(".j2"):
            place = f"{filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place
