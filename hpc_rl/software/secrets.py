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

_ENDS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "JWT"),
    *("APIKEY", "ACCESSKEY"),
)
_LOOSE = ("KEY", "PASS", "PWD", "PAT")
"""Last words of names that may also hold something else: their values count only if they look random."""
_WITHIN = ("TOKEN", "SECRET", "PASSWORD")
"""Words of names such as SECRET_OF_BANK, unless the name ends as that of a place or a property of a secret does."""
_ABOUT = ("PATH", "FILE", "DIR", "URL", "URI", "MODE", "ID", "NAME", "VARIABLE", "LIFETIME", "TYPE", "LIMIT")
_OF_VOCABULARIES = (
    *("BOS", "EOS", "PAD", "UNK", "MASK", "SEP", "CLS", "STOP", "END", "IMAGE", "NEXT", "PER", "LAST", "FIRST"),
)
"""Words before TOKEN in names of tokens of texts."""
_WORKING_FOLDERS = ("PWD", "OLDPWD")
_SHORTEST, _LONG = 6, 16
"""Characters of a value that is looked for as a word, and of one that is looked for anywhere."""
_PLACEHOLDERS = ("secret", "password", "passwd", "changeme", "dummy", "default", "no-key", "token-abc123", "unused")


def names_secret(name: str) -> bool:
    """Return whether a variable of this name usually holds a secret, such as HF_TOKEN or MY_PASSWD."""
    words = _words(name)
    if name in _WORKING_FOLDERS or (words[-1] == "TOKEN" and words[-2:-1] and words[-2] in _OF_VOCABULARIES):
        return False
    about_one = any(word in _WITHIN for word in words[:-1]) and not words[-1].endswith(_ABOUT)
    return about_one or words[-1].endswith(_ENDS) or words[-1] in _LOOSE


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
    return looks_random or _words(name)[-1] not in _LOOSE


def _words(name: str) -> list[str]:
    """Return the words of a variable's name, without a number at its end: MY_KEY_2 -> MY, KEY."""
    return name.rstrip("0123456789").rstrip("_").upper().split("_")


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
