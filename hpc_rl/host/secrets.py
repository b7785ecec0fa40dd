"""Secrets of the user: which variables hold one, and where their values occur.

A secret may reach a text by many ways: `${oc.env:HF_TOKEN}` in a recipe, an option, a program's argument, uncommitted
changes. So it is looked for by its value, in everything that a submission writes.
"""

from __future__ import annotations

import html
import netrc
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from hpc_rl.errors import UserError

_NAME = re.compile(
    r"\w*(TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIALS?|JWT|APIKEY|ACCESSKEY)|(\w+_)?(KEY|PASS|PWD|PAT)"
    r"|(\w+_)?(TOKEN|SECRET|PASSWORD)_(?!\w*(PATH|FILE|DIR|URL|URI|MODE|ID|NAME|VARIABLE|LIFETIME|TYPE|LIMIT)$)\w+",
    re.IGNORECASE,
)
_OF_VOCABULARIES = re.compile(r"(\w+_)?(BOS|EOS|PAD|UNK|MASK|SEP|CLS|STOP|END|IMAGE|NEXT|PER|LAST|FIRST)_TOKEN", re.I)
_WORKING_FOLDERS = ("PWD", "OLDPWD")
_LOOSE = re.compile(r"(\w+_)?(KEY|PASS|PWD|PAT)", re.IGNORECASE)
"""Names that may also hold something else: their values count only if they look random."""
_SHORTEST, _LONG = 6, 16
"""Characters of a value that is looked for as a word, and of one that is looked for anywhere."""
_PLACEHOLDERS = ("secret", "password", "passwd", "changeme", "dummy", "default", "no-key", "token-abc123", "unused")


def names_secret(name: str) -> bool:
    """Return whether a variable of this name usually holds a secret, such as HF_TOKEN or MY_PASSWD."""
    name = re.sub(r"_?\d+$", "", name)
    return bool(_NAME.fullmatch(name)) and not _OF_VOCABULARIES.fullmatch(name) and name not in _WORKING_FOLDERS


def known_secrets(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the secrets that this user has here: value -> its name for messages, such as `$HF_TOKEN`."""
    found = {value: f"${name}" for name, value in environ.items() if names_secret(name) and _is_value(name, value)}
    hub = Path(environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "token"
    return {**dict(_of_files(hub, Path(environ.get("NETRC") or "~/.netrc").expanduser())), **found}


def find_secret(text: str, known: Mapping[str, str]) -> str | None:
    """Return the name of a secret whose value occurs in a text, as it is or as a part of an address; or None."""
    return next((name for value, name in known.items() if _pattern(value).search(text)), None)


def hidden(text: str) -> str:
    """Return a text in which the values of all known secrets are replaced by their names."""
    for value, name in known_secrets().items():
        text = _pattern(value).sub(lambda _, name=name: f"[{name}]", text)  # type: ignore[misc]
    return text


def refuse_secrets(texts: Mapping[str, str]) -> None:
    """Refuse texts that would be written to files or shown.

    Args:
        texts: name of each for the message, such as an option -> text.

    Raises:
        UserError: one contains the value of a secret; the message does not.
    """
    known = known_secrets()
    found = {where: name for where, text in texts.items() if (name := find_secret(text, known))}
    if found:
        lines = (
            f"{where} contains the value of {name}, which job script, config.yaml, job.json and report would show: "
            f"remove it, and let the program read {name} itself: jobs get the variables of your shell"
            for where, name in found.items()
        )
        raise UserError("\n".join(lines))


def _is_value(name: str, value: str) -> bool:
    if len(value) < _SHORTEST or value.lower() in _PLACEHOLDERS or value.startswith(("/", "~/", "./", "$")):
        return False
    looks_random = len(value) >= _LONG and any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return looks_random or not _LOOSE.fullmatch(re.sub(r"_?\d+$", "", name))


def _pattern(value: str) -> re.Pattern[str]:
    forms = "|".join(re.escape(form) for form in dict.fromkeys((value, quote(value, safe=""), html.escape(value))))
    return re.compile(forms if len(value) >= _LONG else rf"(?<!\w)(?:{forms})(?!\w)")


def _of_files(hub: Path, logins: Path) -> Iterator[tuple[str, str]]:
    """Yield the token of the Hugging Face hub, and the passwords of .netrc, where wandb keeps its key."""
    try:
        token = hub.read_text().strip()
        if len(token) >= _LONG:
            yield token, str(hub)
    except (OSError, UnicodeDecodeError):
        pass
    try:
        for _, _, password in netrc.netrc(logins).hosts.values():
            if password and len(password) >= _LONG:
                yield password, str(logins)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return
