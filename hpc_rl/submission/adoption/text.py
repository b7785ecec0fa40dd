"""An adopted script as lines of bash: what was lost, a site profile, and the command. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hpc_rl.config.tree import yaml_text
from hpc_rl.submission.adoption.directives import Adoption
from hpc_rl.submission.adoption.shell import shown

_WIDTH = 110
_FLAGS = ("job-name", "nodes", "gpus-per-node", "cpus-per-task", "mem", "time", "image")


def adoption_text(found: Adoption, script: str, profile: str) -> str:
    """Return lines of bash that write the profile and submit the job.

    Args:
        script: name of the script.
        profile: name of the file for the profile.
    """
    title = f"{script}, adopted by hpc-rl. To see the job script first, add --dry-run after `submit {found.kind}`."
    superfluous = [", ".join(dict.fromkeys(found.superfluous))] if found.superfluous else []
    lines = ["#!/bin/bash", f"# {' '.join(title.split())}"]
    for head, notes in (
        ("Not carried over:", found.lost),
        ("Check:", found.checks),
        ("Superfluous, because hpc-rl does it:", superfluous),
    ):
        lines += (
            ["#", f"# {head}", *(f"# - {' '.join(note.split())}" for note in dict.fromkeys(notes))] if notes else []
        )
    lines.append("")
    if found.folder != ".":
        lines.append(f"cd {shown(found.folder)} &&")
    own: list[str] = []
    values: Mapping[str, Any] = {section: values for section, values in found.profile.items() if values}
    if values:
        own = [f"--site {shlex.quote(profile)}"]
        lines += [
            "# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.",
            f"cat > {shlex.quote(profile)} <<'END' &&",
            f"{yaml_text(values)}END",
        ]
    own += [f"--{name} {shown(found.flags[name])}" for name in _FLAGS if name in found.flags]
    own += [f"--sbatch {shlex.quote(option)}" for option in found.sbatch]
    lines += _filled([f"hpc-rl submit {found.kind}", *own, "--", *map(shown, found.program)])
    return "\n".join(lines) + "\n"


def _filled(words: Sequence[str]) -> Iterator[str]:
    """Yield lines of a command that continue each other. The program begins one, and options keep their values."""
    line = words[0]
    for before, word in pairwise(words):
        is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
        if word == "--" or (len(line) + len(word) > _WIDTH and not is_value):
            yield f"{line} \\"
            line = f"    {word}"
        else:
            line += f" {word}"
    yield line
