"""An adopted script as lines of bash: what was lost, a site profile, and the command. Pure functions."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    lines = ["#!/bin/bash", f"# {' '.join(title.split())}"]
    lines += _notes("Not carried over:", found.lost)
    lines += _notes("Check:", found.checks)
    replaced = [f"{what}: {', '.join(_places(places))}" for what, places in found.superfluous.items()]
    lines += _notes("Superfluous, because hpc-rl does it:", replaced)
    lines.append("")
    if found.folder != ".":
        lines.append(f"cd {shown(found.folder)} &&")
    site = []
    profile_lines = {section: values for section, values in found.profile.items() if values}
    if profile_lines:
        site = [f"--site {shlex.quote(profile)}"]
        lines += [
            "# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.",
            f"cat > {shlex.quote(profile)} <<'END' &&",
            *_yaml(profile_lines).splitlines(),
            "END",
        ]
    flags = [f"--{name} {shown(found.flags[name])}" for name in _FLAGS if name in found.flags]
    own = [*site, *flags, *(f"--sbatch {shlex.quote(option)}" for option in found.sbatch)]
    program = _pairs([shown(word) for word in found.program])
    lines += _filled([f"hpc-rl submit {found.kind}", *own], "    ", last=" \\")
    lines += [f"    {line}" for line in _filled(["--", *program], "    ")]
    return "\n".join(lines) + "\n"


def _yaml(profile: Mapping[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump(profile, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000))


def _notes(title: str, notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield "#"
        yield f"# {title}"
    for note in dict.fromkeys(notes):
        first, *others = textwrap.wrap(note, _WIDTH - 4, break_on_hyphens=False, break_long_words=False)
        yield f"# - {first}"
        yield from (f"#   {line}" for line in others)


def _pairs(words: Sequence[str]) -> list[str]:
    """Join options with their values, so that they stay on one line."""
    found: list[str] = []
    for word in words:
        if found and re.fullmatch(r"-[^ =]*", found[-1]) and not word.startswith("-"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _filled(words: Sequence[str], indent: str, last: str = "") -> Iterator[str]:
    """Yield lines of a command that continue each other."""
    line = words[0]
    for word in words[1:]:
        if len(line) + len(word) > _WIDTH:
            yield f"{line} \\"
            line = f"{indent}{word}"
        else:
            line += f" {word}"
    yield line + last


def _places(places: Sequence[str | int]) -> Iterator[str]:
    """Yield options, and ranges of lines."""
    yield from (place for place in places if isinstance(place, str))
    numbers = sorted({place for place in places if isinstance(place, int)})
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    shown = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    if shown:
        yield f"line{'s' if len(numbers) > 1 else ''} {', '.join(shown)}"
