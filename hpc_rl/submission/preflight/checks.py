"""The checks of a job on the login node, before it is queued. CHECKS lists them."""

from __future__ import annotations

import grp
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator

from hpc_rl.adapters.adapter import ProgramPlace
from hpc_rl.adapters.launchers import launcher_conflicts
from hpc_rl.adapters.prefixes import plain
from hpc_rl.adapters.program import Program
from hpc_rl.config.job import JobConfig
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_name, engine_spec
from hpc_rl.config.training.common import ModelConfig
from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.config.training.preferences import RmConfig
from hpc_rl.config.training.select import SelectConfig
from hpc_rl.data.selection import check_scored
from hpc_rl.environments.loading import ENVIRONMENT, TOOLS
from hpc_rl.errors import UserError
from hpc_rl.images.run_options import image_preflight
from hpc_rl.liveness.activity import doing
from hpc_rl.plan.memory import computed_here, models_of
from hpc_rl.rewards.check import check_url
from hpc_rl.software.ray_version import check_ray, installed_ray
from hpc_rl.software.secrets import names_secret
from hpc_rl.submission.hub import hub_cache
from hpc_rl.submission.job import Job
from hpc_rl.submission.preflight.code import (
    check_environment_name,
    check_imports,
    check_reward,
    check_tools,
    user_names,
)
from hpc_rl.submission.preflight.data import check_train_data, check_val_data
from hpc_rl.submission.preflight.folders import check_locks, check_run_dir, check_shared
from hpc_rl.submission.preflight.gpus import (
    allocator_variables,
    check_allocator,
    check_slices,
    connected_gpus,
    sends_by,
)
from hpc_rl.submission.preflight.model import (
    check_adapters,
    check_chat_template,
    check_config,
    check_is_classifier,
    check_is_language_model,
    check_model_path,
    check_outputs,
    check_same_special_tokens,
    check_same_vocabulary,
    check_unquantised,
)
from hpc_rl.submission.preflight.model_rules import rules_for
from hpc_rl.submission.preflight.partition import check_partition, partition_request
from hpc_rl.submission.preflight.program import (
    check_agent,
    check_conflicts,
    check_packages,
    check_ray_program,
    check_requirements,
    check_torchrun_program,
    has_unknown_python,
)
from hpc_rl.submission.script.setup_lines import bash_errors, is_complete, statements
from hpc_rl.submission.series.after import is_coming
from hpc_rl.tracking.wandb_sync import check_settings

_REPLACES = re.compile(r"(.*[;&|({]\s*)?exec\s+(-\w+\s+)*[^-\s<>&{\d]")
"""A line of bash in which a program takes the place of the shell. `exec > FILE` and `exec 3< FILE` only redirect."""


Question = tuple[Callable[..., str | None], *tuple[Hashable, ...]]
"""A check and its arguments. It returns what it could not check, and raises UserError for problems. Equal questions of
several jobs are asked once."""


def check(*jobs: Job, local: bool = False) -> list[str]:
    """Run all checks of some jobs.

    Args:
        local: the jobs run on this machine, without Slurm.

    Returns:
        What could not be checked here and is checked when the job starts.

    Raises:
        UserError: all problems, a line each.
    """
    checks = CHECKS if local else (*CHECKS, partition, shared)
    problems, notes = [], []
    asked = {question: purpose_of(look) for job in jobs for look in checks for question in look(job)}
    for question, purpose in asked.items():
        try:
            with doing(f"checking {purpose}"):
                function, *arguments = question
                note = function(*arguments)
            if note:
                notes += note.splitlines()
        except UserError as error:
            problems.append(str(error))
    if problems:  # jobs of a pipeline may ask several questions with the same answer
        raise UserError("\n".join(dict.fromkeys(problems)))
    return list(dict.fromkeys(notes))


def purpose_of(look: Callable[[Job], Iterator[Question]]) -> str:
    """Return what the questions of a check are for: "whether ..."."""
    return " ".join(str(look.__doc__).removeprefix("Ask ").partition(".")[0].split())


def run_directory(job: Job) -> Iterator[Question]:
    """Ask whether the run directory can be written."""
    yield check_run_dir, job.run_dir.path, job.config.slurm.group
    if job.config.slurm.group is not None:
        yield check_group, job.config.slurm.group


def secrets(job: Job) -> Iterator[Question]:
    """Ask whether secrets are in variables only. Many files and commands show the configuration."""
    config = job.config
    paths = ("/", "~", "$")
    named = sorted(name for name, value in config.slurm.env.items() if not value.startswith(paths))
    yield check_secrets, *tuple(named)
    name = config.rollout.openai.key_variable if isinstance(config, GenerateConfig) else None
    if name is not None and not config.slurm.setup:
        yield check_key, name, bool(os.environ.get(name))


def tracking(job: Job) -> Iterator[Question]:
    """Ask whether wandb would read settings of another user."""
    if "wandb" in getattr(job.config.trainer, "logger", ()):
        yield (check_settings,)


def bash_lines(job: Job) -> Iterator[Question]:
    """Ask whether bash can read the commands of the configuration."""
    for key, lines in {"slurm.setup": job.config.slurm.setup, "slurm.epilogue": job.config.slurm.epilogue}.items():
        if lines:
            yield check_bash, key, tuple(lines)


def image(job: Job) -> Iterator[Question]:
    """Ask whether the container image exists and can be run."""
    container = job.config.container
    if not job.expects(container.image):
        for one in image_preflight(container):
            yield one, container


def gpus(job: Job) -> Iterator[Question]:
    """Ask whether the GPUs can work together as the job needs it."""
    config = job.config
    if config.slurm.gpu_type is not None and (connected := connected_gpus(config)) > 1:
        yield check_slices, config.slurm.gpu_type, connected
    if isinstance(config, PpoConfig) and sends_by(config, "ipc"):
        yield check_allocator, *allocator_variables(config)


def packages(job: Job) -> Iterator[Question]:
    """Ask whether the job's Python has the packages that the job needs. An image has its own Python."""
    config, slurm = job.config, job.config.slurm
    if has_unknown_python(config):
        return
    yield check_packages, slurm.python, job.row.needs, job.kind
    if job.row.takes_program and job.adapted.runs_in_job_python and (needs := job.adapter.needs(job.adapted)):
        yield check_packages, slurm.python, tuple(needs), job.adapter.title, None
    if isinstance(config, PpoConfig) and (file := config.carrier_spec.requirements) is not None:
        yield check_requirements, slurm.python, file
    for package, purpose in _further_packages(config):
        yield check_packages, slurm.python, (package,), purpose, None
    if slurm.python is None and isinstance(config, RayJobConfig) and (ray := installed_ray()) is not None:
        yield check_ray, ray, sys.executable


def _further_packages(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield packages that only some options need, and these options."""
    if isinstance(config, FinetuneConfig | PpoConfig):
        if config.model.lora.quantize is not None:
            yield "bitsandbytes", "model.lora.quantize"
        if "8bit" in (one.moments for one in config.optimizers.values()):
            yield "torchao", "optim.moments=8bit"
        if config.model.use_liger:
            yield "liger_kernel", "model.use_liger"
    if isinstance(config, PpoConfig | GenerateConfig) and (package := engine_spec(config).package) is not None:
        yield package, _engine_as_chosen(config)


def _engine_as_chosen(config: PpoConfig | GenerateConfig) -> str:
    """Return the option that chose the engine, for a message."""
    if config.rollout.name != "auto":
        return f"rollout.name={config.rollout.name}"
    return f"rollout.name=auto, which is {engine_name(config.rollout, config.trainer.computes_on)} on GPUs,"


def model(job: Job) -> Iterator[Question]:
    """Ask whether every model of the job can be loaded."""
    config = job.config
    if not isinstance(config, FinetuneConfig | PpoConfig | GenerateConfig):
        return
    cache = hub_cache(config)
    has_weights = not (isinstance(config, GenerateConfig) and config.rollout.openai.base_url is not None)
    yield check_model_path, "model.path", config.model.path, job.coming, cache, has_weights
    if not job.expects(config.data.chat_template or config.model.tokenizer_path):
        yield check_chat_template, config.model, config.data, cache
    if isinstance(config, RmConfig):
        yield check_outputs, "model.path", config.model.path, config.outputs, cache
    else:
        yield check_is_language_model, "model.path", config.model.path, cache
    for key, path in models_of(config).items():
        if key != "model.path":
            yield check_model_path, key, path, job.coming, cache
            yield check_same_vocabulary, key, path, config.model, cache
        if key in ("teacher.path", "ref.path"):
            yield check_is_language_model, key, path, cache
            yield check_same_special_tokens, key, path, config.model, cache
        if key in computed_here(config):
            yield check_unquantised, key, path, cache
        for refuse, more in rules_for(key, config):
            yield check_config, key, path, cache, refuse, more
        if key == "critic.path":
            yield check_outputs, key, path, 1, cache
        elif key == "reward.model" and isinstance(config, PpoConfig | GenerateConfig):
            yield check_is_classifier, key, path, cache
            yield check_outputs, key, path, config.reward.outputs, cache
    if isinstance(config.model, ModelConfig) and config.model.lora.is_used:
        max_rank = None
        if isinstance(config, PpoConfig) and not config.rollout.merge_lora:
            max_rank = engine_spec(config).max_lora_rank
        yield check_adapters, config.model, max_rank, job.coming, cache


def data(job: Job) -> Iterator[Question]:
    """Ask whether the data can be read, and fills a batch of training."""
    if isinstance(job.config, FinetuneConfig | PpoConfig):
        found, cache = job.config.data, hub_cache(job.config)
        yield check_train_data, found, job.coming, cache
        for file in found.val_files:
            yield check_val_data, "data.val_files", file, found, job.coming, cache
    elif isinstance(job.config, GenerateConfig):
        for file in job.config.data.files:
            yield check_val_data, "data.files", file, job.config.data, job.coming, hub_cache(job.config)
    elif isinstance(job.config, SelectConfig):
        for file in job.config.select.responses:
            if not is_coming(file, job.coming):
                yield check_scored, file


def reward(job: Job) -> Iterator[Question]:
    """Ask whether the reward function can be called, or the URL of the reward server is valid."""
    config = job.config
    if not isinstance(config, PpoConfig | GenerateConfig):
        return
    same_python = config.slurm.python is None and config.container.image is None
    for each in config.reward.each_function():
        if not job.expects(each.function):
            yield check_reward, each, same_python
    if config.reward.url is not None:
        yield check_url, config.reward.url


def environment(job: Job) -> Iterator[Question]:
    """Ask whether the environment and the tools of conversations exist."""
    config = job.config
    if not isinstance(config, PpoConfig | GenerateConfig):
        return
    same_python = config.slurm.python is None and config.container.image is None
    named = [(ENVIRONMENT, config.environment.name)] if config.environment.name is not None else []
    for option, name in [*named, *((TOOLS, tool) for tool in config.environment.tools)]:
        if not job.expects(name):
            yield check_environment_name, option, name, same_python
    yield check_tools, config.environment, config.model, config.data, hub_cache(config)
    if config.container.image is None and not config.slurm.modules and not config.slurm.setup:
        for option, name in user_names(config.reward, config.environment):
            yield check_imports, option, name, config.slurm.python


def agent(job: Job) -> Iterator[Question]:
    """Ask whether the command of the agents can be started."""
    if isinstance(job.config, PpoConfig) and job.config.agent.command and not job.expects(*job.config.agent.command):
        yield check_agent, tuple(job.config.agent.command)


def program(job: Job) -> Iterator[Question]:
    """Ask whether the user's own program can be started."""
    if job.row.takes_program and not job.expects(*job.program):
        yield PROGRAMS[job.row.node_entry], job.program


def adapter(job: Job) -> Iterator[Question]:
    """Ask whether the program's own options agree with the job."""
    if job.row.takes_program:
        trainer = job.config.trainer
        place = ProgramPlace(job.run_dir, trainer.nnodes, trainer.n_gpus_per_node).after_attempts()
        of_launcher = launcher_conflicts(plain(Program(job.typed)), place) if job.kind == "torchrun" else ()
        yield check_conflicts, (*of_launcher, *job.adapter.conflicts(job.adapted, place))


def partition(job: Job) -> Iterator[Question]:
    """Ask whether the partition has enough nodes, and time, for the job."""
    if ask := partition_request(job.config):
        yield check_partition, ask, job.nodes


def shared(job: Job) -> Iterator[Question]:
    """Ask whether the nodes see the folders of the job."""
    output = job.adapter.folder(job.adapted) if job.row.takes_program else None
    yield check_shared, job.run_dir.path, job.working_dir, job.nodes, output


def locks(job: Job) -> Iterator[Question]:
    """Ask whether the ranks of several nodes can meet in the run directory."""
    config = job.config
    judges = isinstance(config, GenerateConfig) and config.reward.model is not None
    if config.trainer.nnodes > 1 and (judges or isinstance(config, FinetuneConfig | PpoConfig)):
        yield check_locks, job.run_dir.path


CHECKS: tuple[Callable[[Job], Iterator[Question]], ...] = (
    run_directory,
    locks,
    secrets,
    tracking,
    bash_lines,
    image,
    gpus,
    packages,
    model,
    data,
    reward,
    environment,
    agent,
    adapter,
    program,
)
"""The checks of every job; `partition` is added for jobs that are queued."""
PROGRAMS: dict[str, Callable[[tuple[str, ...]], str | None]] = {
    "hpc_rl.node.torchrun": check_torchrun_program,
    "hpc_rl.node.ray_cluster.node": check_ray_program,
}
"""Node entry -> the check of the programs that it starts."""


def check_secrets(*names: str) -> None:
    """Raise UserError if one of the variables in slurm.env usually holds a secret."""
    for name in names:
        if names_secret(name):
            raise UserError(
                f"slurm.env.{name}: the job script, config.yaml, job.json and the report would show it; leave it out, "
                f"and `export {name}=...` before you submit: sbatch passes on the variables of the shell"
            )


def check_key(name: str, is_set: bool) -> None:
    """Raise UserError if the variable with the key for a server is not set."""
    if not is_set:
        raise UserError(
            f"rollout.openai.key_variable is {name}, and this shell has no such variable: `export {name}=...` before "
            "you submit (sbatch passes on the variables of the shell), or set it in slurm.setup"
        )


def check_group(group: str) -> None:
    """Raise UserError if there is no such UNIX group, or the user is not a member of it."""
    names = [grp.getgrgid(number).gr_name for number in {os.getgid(), *os.getgroups()}]
    if group not in names and os.geteuid() != 0:
        raise UserError(f"slurm.group {group}: you are not a member of such a group; yours are {', '.join(names)}")


def check_bash(key: str, lines: tuple[str, ...]) -> None:
    """Raise UserError if bash cannot read these lines of the job script, such as a quote that is not closed."""
    shown = repr("; ".join(lines))
    if said := bash_errors(lines):
        raise UserError(f"{key}: bash cannot read {shown}: {said[-1].removeprefix('/bin/bash: -c: ')}")
    if not is_complete("\n".join(lines)):
        raise UserError(f"{key}: {shown} ends with a backslash, which would join it to the next line of the job script")
    if replacing := next((one for one in statements(lines) if _REPLACES.match(one)), None):
        raise UserError(
            f"{key}: {replacing!r} replaces the job script, so that nothing is trained: start the program without exec"
        )
