"""The statements and words of a bash script, without running it. Pure functions, except for `bash -n` and sums.

This is no parser of bash: a word gets the values of variables that the script sets to literal texts. Everything else,
such as `$(date)`, becomes a mark that names what is unknown, and stays one in the values that are made from it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from hpc_rl.submission.script.setup_lines import BASH_TIMEOUT_S, is_complete


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


KEYWORDS = names("if then else elif do while until for case select function { ! [[ [ test time")
OF_SHELL = ("HOME", "USER", "PWD")
"""Variables that every shell has."""
MARK = re.compile("\ue000([^\ue000\ue001]*)\ue001")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")
_DECLARING = ("export", "declare", "typeset", "readonly", "local")
_READING = names("read mapfile readarray getopts")
_PLAIN = re.compile(r"[\w./:@%+=, -]*")
_MOST_UNREADABLE = 5
"""Commands that bash cannot read. Each takes a reading of the rest of the script; further ones are taken by lines."""
_QUOTED = re.compile(
    r"""(?P<mark>\ue000[^\ue001]*\ue001)|(?P<escape>\\.)|(?P<quote>")|(?P<expansion>\$(?=[\w({@*#?!$])|`)|.""", re.S
)
_BARE = re.compile(
    r"""(?P<mark>\ue000[^\ue001]*\ue001)|(?P<single>'[^']*')|(?P<escape>\\.)
    |(?P<items>"\$(?:@|\{\w+\[@\]\})")|(?P<quote>")|(?P<expansion>\$(?=[\w({@*#?!$])|`)
    |(?P<redirection>(?:(?<!\S)\d|&)?[<>]+(?:&\d?-?)?)|(?P<array>\()|(?P<operator>[;|&\n]+|\))|(?P<glob>\*)
    |(?P<home>~)|(?P<space>[ \t\r]+)|(?P<comment>(?<!\S)\#[^\n]*)|.""",
    re.S | re.X,
)


class Array(str):
    """The word NAME=( ... )."""

    items: list[str]


@dataclass(frozen=True)
class Command:
    """A part of a statement between operators."""

    words: list[str]
    text: str
    operator: str
    """The one after it; empty at the end."""


def statements(script: str) -> Iterator[tuple[int, str]]:
    """Yield what bash can read alone, a line or several such as a loop, and the number of its first line.

    A command that bash cannot read, such as one with `<NAME>`, is a statement too.
    """
    lines, start, unreadable = script.splitlines(), 0, 0
    while start < len(lines):
        end = start + 1
        if not lines[start].strip() or lines[start].lstrip().startswith("#"):
            start = end
            continue
        is_plain = _PLAIN.fullmatch(lines[start]) and lines[start].split()[0] not in KEYWORDS
        while not is_plain and end <= len(lines) and unreadable < _MOST_UNREADABLE:
            if is_complete("\n".join(lines[start:end])):
                break
            end += 1
        if end > len(lines) or unreadable >= _MOST_UNREADABLE:
            unreadable, end = unreadable + 1, start + 1
            while lines[end - 1].endswith("\\") and end < len(lines):
                end += 1
        yield start + 1, "\n".join(lines[start:end]).strip()
        start = end


def mark(name: str) -> str:
    return f"\ue000{name}\ue001"


class Scope:
    """The variables of a script, as far as they are known."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values: dict[str, str | list[str]] = dict(values)
        self.sources: dict[str, str] = {}
        """Name in a mark -> what the script has there; none for variables that it does not set."""
        self.doubts: dict[str, tuple[str, str]] = {}
        """Variable -> its value, and why it may have another one in the job."""

    def assign(self, word: str) -> None:
        """Assign NAME=VALUE or NAME+=VALUE."""
        name, _, value = word.partition("=")
        new: str | list[str] = word.items if isinstance(word, Array) else value
        if name.endswith("+"):
            name = name[:-1]
            old = self.values.get(name, [] if isinstance(new, list) else "")
            new = [*old, *new] if isinstance(old, list) else old + (new if isinstance(new, str) else " ".join(new))
        elif isinstance(new, str) and (match := MARK.fullmatch(new)) and match[1].startswith("VALUE"):
            self.sources[name], new = self.sources[match[1]], mark(name)
        self.values[name] = new

    def forget(self, name: str, source: str) -> None:
        """Take a variable as unknown, which the text `source` sets."""
        self.sources[name], self.values[name] = source, mark(name)

    def doubt(self, name: str, value: str | list[str], why: str) -> None:
        """Note why a variable may have another value in the job."""
        text = " ".join(value if isinstance(value, list) else value.split())
        self.doubts[name] = text, plain(f"{name} is {text if len(text) < 60 else text[:60] + ' ...'} here: {why}")

    def run(self, text: str) -> Iterator[Command]:
        """Yield the commands in a text, and set the variables that they set."""
        for command in self.commands(text):
            assigned, is_read = self.assigned(command), _READING.intersection(command.words[:2])
            for name in assigned if is_read else ():
                self.forget(name, command.text)
            for word in command.words if assigned and not is_read else ():
                if ASSIGNMENT.match(word):
                    self.assign(word)
            yield command

    def assigned(self, command: Command) -> list[str]:
        """Return the variables that a command sets, other than for a program that it starts."""
        words = [word for word in command.words if word not in KEYWORDS]
        if _READING.intersection(words[:2]):
            return [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word) and word not in _READING]
        names = [re.split(r"[\[+=]", word)[0] for word in words if re.match(r"[A-Za-z_]\w*($|\[|\+?=)", word)]
        return names[1:] if words[:1] and words[0] in _DECLARING else names if all(map(ASSIGNMENT.match, words)) else []

    def words(self, text: str) -> list[str]:
        return [word for command in self.commands(text) for word in command.words]

    def commands(self, text: str) -> Iterator[Command]:
        """Yield the commands in a text, without redirections and comments. Variables that are set meanwhile count."""
        words, word, start, position = list[str](), "", 0, 0
        in_word = is_quoted = skips_word = False  # skips_word: the next one is the file of a redirection

        def end_word() -> None:
            nonlocal word, in_word, skips_word
            if in_word and not skips_word:
                words.append(word)
            word, in_word, skips_word = "", False, skips_word and not in_word

        while position <= len(text):
            match = (_QUOTED if is_quoted else _BARE).match(text, position)
            kind, part = (match.lastgroup, match[0]) if match else ("operator", "")
            begin, position = position, match.end() if match else position + 1
            if kind == "array" and re.fullmatch(r"\w+\+?=", word):
                position = _end(text, begin, "(", ")")
                words.append(array := Array(word))
                array.items, word, in_word = self.words(text[begin + 1 : position - 1]), "", False
            elif kind in ("operator", "array", "comment"):
                end_word()
                operator = "" if kind == "comment" else part.strip(" \n")
                if words:
                    yield Command(words, text[start:begin].strip(), operator or ";")
                words, start = [], position
            elif kind in ("space", "redirection"):
                end_word()
                skips_word = skips_word or (kind == "redirection" and "&" not in part[1:])
            elif kind == "items":
                words += self._items(part[2:-1].strip("{}").removesuffix("[@]"))
            elif kind == "expansion":
                value, position = self._expansion(text, begin)
                is_whole = is_quoted or '"' in text[begin:position]
                for index, piece in enumerate([value] if is_whole else re.split(r"\s+", value)):
                    if index:
                        end_word()
                    word, in_word = word + piece, in_word or bool(piece) or is_whole
            elif part != "\\\n":
                is_quoted ^= kind == "quote"
                word, in_word = word + _literal(kind, part, is_quoted, word), True

    def _items(self, name: str) -> list[str]:
        value = mark("@") if name == "@" else self.values.get(name, mark(name))
        return value if isinstance(value, list) else [value]

    def _expansion(self, text: str, start: int) -> tuple[str, int]:
        """Return the value of the expansion that begins at a position, and the position after it."""
        if text.startswith("$((", start):
            end = _end(text, start + 1, "(", ")")
            return self._sum(text[start + 3 : end - 2], text[start:end]), end
        if text[start] == "`":
            end = text.find("`", start + 1) + 1 or len(text)
            return self._unknown(text[start:end]), end
        if text[start + 1] == "(":
            end = _end(text, start + 1, "(", ")")
            return mark("PWD") if text[start:end] == "$(pwd)" else self._unknown(text[start:end]), end
        if text[start + 1] == "{":
            end = _end(text, start + 1, "{", "}")
            return self._parameter(text[start + 2 : end - 1], text[start:end]), end
        match = re.compile(r"\$(\d|\w+|.)", re.S).match(text, start)
        assert match
        return self._parameter(match[1], match[0]), match.end()

    def _parameter(self, inner: str, source: str) -> str:
        match = re.fullmatch(r"(\w+|[@*])(\[[@*]\])?(?::?([-=])(.*))?", inner, re.S)
        if match is None:
            return self._unknown(source)
        name, default = match[1], match[4]
        if name in "@*" or name.isdigit():
            is_short = re.fullmatch(r"[\w./:@%+=,-]*", default or "")
            return mark("@" if name in "@*" else inner) if is_short else self._unknown(source)
        value = self.values.get(name)
        if not value and default and not name.startswith("SLURM_"):
            value = " ".join(self.words(default))
            self.doubt(name, value, "its default in the script")
            self.values |= {name: value} if match[3] == "=" else {}
        if value is None:
            return mark(f"{name}:-" if default == "" else name)
        return value if isinstance(value, str) else " ".join(value) if match[2] else value[0] if value else ""

    def _sum(self, inner: str, source: str) -> str:
        """Return the value of whole numbers and variables with + - * / % ( ), which bash calculates."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: self._parameter(found[1], found[0]), inner)
        is_known = re.fullmatch(r"[\d+*/%() -]{1,200}", text)
        return (_calculated(text) if is_known else "") or self._unknown(source)

    def _unknown(self, source: str) -> str:
        known = next((name for name, text in self.sources.items() if text == source and name.startswith("VALUE")), None)
        name = known or f"VALUE{sum(name.startswith('VALUE') for name in self.sources) + 1}"
        self.sources[name] = source
        return mark(name)


@cache
def _calculated(text: str) -> str:
    command = ["/bin/bash", "-c", f"echo $(({text}))"]
    return subprocess.run(command, capture_output=True, text=True, timeout=BASH_TIMEOUT_S, check=False).stdout.strip()


def _literal(kind: str | None, part: str, is_quoted: bool, before: str) -> str:
    """Return what a part of a word without an expansion stands for, after the beginning of the word."""
    if kind == "quote":
        return ""
    if kind == "single":
        return part[1:-1]
    if kind == "escape":
        return part if is_quoted and part[1] not in '$`"\\' else part[1]
    if kind == "home" and re.fullmatch(r"(\w+=)?", before):
        return mark("HOME")
    return mark("**") if kind == "glob" else part


def plain(text: str) -> str:
    """Return a text with ${NAME} for marks."""
    return MARK.sub(lambda found: f"${{{found[1]}}}", text)


def options(words: Iterable[str], short: Mapping[str, str] | None = None) -> Iterator[tuple[str, str | None]]:
    """Yield the options in some words, with `-` for `_`, and their values; the name of a word without option is empty.

    Args:
        short: letter -> long name, if values may follow a letter directly.
    """
    name = ""
    for word in [*words, "-"]:
        if name and word.startswith("-"):
            yield name, None
        elif name or not word.startswith("-"):
            yield name, word
        name, equals, value = word.lstrip("-").partition("=") if word.startswith("-") else ("", "", "")
        name = name.replace("_", "-")
        if short is not None and name and not word.startswith("--"):
            name, equals = short.get(word[1], word[1]), word[2:]
            value = equals.removeprefix("=")
        if equals:
            yield name, value
            name = ""


def shown(word: str) -> str:
    """Return a word as bash reads it. What is unknown is a variable that has to be set."""
    parts = MARK.split(word)
    return "".join(_form(part) if index % 2 else part and shlex.quote(part) for index, part in enumerate(parts)) or "''"


def _form(name: str) -> str:
    if name == "**":
        return "*"
    if name in OF_SHELL or name == "@" or name.isdigit():
        return f'"${name}"'
    if name.endswith(":-"):
        return f"${{{name}}}"
    return f'"${{{name}}}"' if name[0].isdigit() else f'"${{{name}:?}}"'


def _end(text: str, start: int, opening: str, closing: str) -> int:
    """Return the position after the bracket that closes the one at a position."""
    depth = 0
    for match in re.compile(rf"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[{opening}{closing}]", re.S).finditer(text, start):
        depth += (match[0] == opening) - (match[0] == closing)
        if depth == 0:
            return match.end()
    return len(text)
