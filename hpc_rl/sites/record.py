"""The newest result of `hpc-rl doctor --train` in the user's site profile: a block of comments at its end."""

from __future__ import annotations

from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.sites.profile import USER
from hpc_rl.system.files import write_atomically

BEGIN = "# begin: result of hpc-rl doctor --train, which replaces this block"
END = "# end: result of hpc-rl doctor --train"


def write_record(text: str, path: Path | None = None) -> Path:
    """Write a result into a profile, which is created if there is none. The settings of the profile stay as they are.

    Args:
        path: the profile. Default: the user's.

    Returns:
        the profile's path.

    Raises:
        UserError: the profile cannot be read or written.
    """
    path = path or USER.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        write_atomically(path, with_record(before, text))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise UserError(f"the result cannot be written to the site profile {path}: {reason}") from error
    return path


def with_record(profile: str, text: str) -> str:
    """Return the text of a profile with a result in place of an earlier one."""
    settings, _ = split(profile)
    block = "\n".join([BEGIN, *(f"#   {line}".rstrip() for line in text.splitlines()), END])
    return f"{settings.rstrip()}\n\n{block}\n".lstrip()


def split(profile: str) -> tuple[str, str]:
    """Return a profile without its result, and the block of the result, which may be empty."""
    begin = profile.find(BEGIN)
    end = profile.find(END, begin)
    if begin < 0 or end < 0:
        return profile, ""
    end += len(END)
    return profile[:begin] + profile[end:].lstrip("\n"), profile[begin:end]


def has_settings(profile: str) -> bool:
    """Whether a profile has anything except comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in profile.splitlines())
