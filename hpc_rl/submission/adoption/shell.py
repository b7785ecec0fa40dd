"""The statements and words of a bash script, without running it. Pure functions, except for `bash -n`.

This is no parser of bash: a word gets the values of variables that the script sets to literal texts. Everything else,
such as `$(date)`, becomes a mark that names what is unknown, and stays one in the values that are made from it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_rl.submission.script.setup_lines import is_complete


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


KEYWORDS = names("if then else elif do while until for case select function { ! [[ [ test time")
OF_SHELL = ("HOME", "USER", "PWD")
"""Variables that every shell has."""
MARK = re.compile("\ue000([^\ue000\ue001]*)\ue001")
_PLAIN = re.compile(r"[\w./:@%+=, -]*")
_MOST_UNREADABLE = 5
"""Commands that bash cannot read. Each takes a reading of the rest of the script; further ones are taken by lines."""
_DEFINITION = re.compile(r"\s*(?:function\s+([\w-]+)|([\w-]+)\s*\(\))")
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
class Statement:
    """A part of a script that bash can read alone: a line, or several such as a loop."""

    number: int
    """Of its first line."""
    text: str

    @property
    def defines(self) -> str:
        """The name of the function that it defines; empty otherwise."""
        match = _DEFINITION.match(self.text)
        return (match[1] or match[2]) if match else ""

    @property
    def is_compound(self) -> bool:
        return bool(self.defines or re.match(r"(if|while|until|for|case|select|\[\[?|\{|test)\s|\(", self.text))


@dataclass(frozen=True)
class Command:
    """A part of a statement between operators."""

    words: list[str]
    text: str
    operator: str
    """The one after it; empty at the end."""


def statements(script: str) -> Iterator[Statement]:
    """Yield the statements of a script. A command that bash cannot read, such as one with `<NAME>`, is one too."""
    lines, start, unreadable = script.splitlines(), 0, 0
    while start < len(lines):
        end = start + 1
        if not lines[start].strip() or lines[start].lstrip().startswith("#"):
            start = end
            continue
        while end <= len(lines) and unreadable < _MOST_UNREADABLE and not _is_whole("\n".join(lines[start:end])):
            end += 1
        if end > len(lines) or unreadable >= _MOST_UNREADABLE:
            unreadable, end = unreadable + 1, start + 1
            while lines[end - 1].endswith("\\") and end < len(lines):
                end += 1
        yield Statement(start + 1, "\n".join(lines[start:end]).strip())
        start = end


def _is_whole(text: str) -> bool:
    is_plain = _PLAIN.fullmatch(text) and text.split()[0] not in KEYWORDS
    return bool(is_plain) or is_complete(text)


def mark(name: str) -> str:
    return f"\ue000{name}\ue001"


class _Commands:
    """Collects the words of a text into commands."""

    def __init__(self, text: str) -> None:
        self.text, self.start = text, 0
        self.words: list[str] = []
        self.word: str | None = None
        self.skips_word = False
        """Whether the next word is the file of a redirection."""

    def add(self, text: str) -> None:
        self.word = (self.word or "") + text

    def add_expanded(self, value: str, is_whole: bool) -> None:
        for index, piece in enumerate([value] if is_whole else re.split(r"\s+", value)):
            if index:
                self.end_word()
            if piece or is_whole:
                self.add(piece)

    def add_array(self, items: list[str]) -> None:
        array = Array(self.word or "")
        array.items, self.word = items, None
        self.words.append(array)

    def end_word(self) -> None:
        if self.word is not None and not self.skips_word:
            self.words.append(self.word)
        self.skips_word = self.skips_word and self.word is None
        self.word = None

    def end_command(self, operator: str, end: int, start: int) -> Iterator[Command]:
        """Yield a command, whose text ends at one position; that of the next one starts at another."""
        self.end_word()
        text, words = self.text[self.start : end].strip(), self.words
        self.words, self.start = [], start
        if words:
            yield Command(words, text, operator.strip(" \n") or ";")


class Scope:
    """The variables of a script, as far as they are known."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values: dict[str, str | list[str]] = dict(values)
        self.sources: dict[str, str] = {}
        """Name in a mark -> what the script has there; none for variables that it does not set."""
        self.doubts: dict[str, tuple[str, str]] = {}
        """Variable -> its value, and why it may have another one in the job."""

    def assign(self, word: str) -> str:
        """Assign NAME=VALUE or NAME+=VALUE; return the name."""
        name, _, value = word.partition("=")
        new: str | list[str] = word.items if isinstance(word, Array) else value
        if name.endswith("+"):
            name = name[:-1]
            old = self.values.get(name, [] if isinstance(new, list) else "")
            new = [*old, *new] if isinstance(old, list) else old + (new if isinstance(new, str) else " ".join(new))
        elif isinstance(new, str) and (match := MARK.fullmatch(new)) and match[1].startswith("VALUE"):
            self.forget(name, self.sources[match[1]])
            return name
        self.values[name] = new
        return name

    def forget(self, name: str, source: str) -> None:
        """Take a variable as unknown.

        Args:
            source: the text that sets it.
        """
        self.sources[name] = source
        self.values[name] = mark(name)

    def doubt(self, name: str, source: str, number: int) -> None:
        """Keep the value of a variable that a condition or loop may change; forget it if there is none."""
        if (value := self.values.get(name)) and not MARK.fullmatch(str(value)):
            self._doubt(name, value, f"line {number} may change it")
        else:
            self.forget(name, source)

    def _doubt(self, name: str, value: str | list[str], why: str) -> None:
        text = " ".join(value if isinstance(value, list) else value.split())
        self.doubts[name] = text, plain(f"{name} is {text if len(text) < 60 else text[:60] + ' ...'} here: {why}")

    def words(self, text: str) -> list[str]:
        return [word for command in self.commands(text) for word in command.words]

    def commands(self, text: str) -> Iterator[Command]:
        """Yield the commands in a text, without redirections and comments. Variables that are set meanwhile count."""
        found, position, is_quoted = _Commands(text), 0, False
        while position < len(text):
            match = (_QUOTED if is_quoted else _BARE).match(text, position)
            assert match
            kind, part, begin, position = match.lastgroup, match[0], match.start(), match.end()
            if kind == "quote":
                is_quoted = not is_quoted
                found.add("")
            elif kind == "single":
                found.add(part[1:-1])
            elif kind == "escape":
                if part[1] != "\n":
                    found.add(part if is_quoted and part[1] not in '$`"\\' else part[1])
            elif kind == "items":
                found.words += self._items(part[2:-1].strip("{}").removesuffix("[@]"))
            elif kind == "expansion":
                value, position = self._expansion(text, begin)
                found.add_expanded(value, is_whole=is_quoted or '"' in text[begin:position])
            elif kind == "space":
                found.end_word()
            elif kind == "redirection":
                found.end_word()
                found.skips_word = "&" not in part[1:]
            elif kind == "array" and re.fullmatch(r"\w+\+?=", found.word or ""):
                position = _end(text, begin, "(", ")")
                found.add_array(self.words(text[begin + 1 : position - 1]))
            elif kind in ("operator", "array", "comment"):
                yield from found.end_command("" if kind == "comment" else part, begin, position)
            elif kind == "home" and not re.fullmatch(r"(\w+=)?", found.word or ""):
                found.add(part)
            else:
                found.add(mark("HOME") if kind == "home" else mark("**") if kind == "glob" else part)
        yield from found.end_command("", len(text), len(text))

    def _items(self, name: str) -> list[str]:
        value = mark("@") if name == "@" else self.values.get(name, mark(name))
        return value if isinstance(value, list) else [value]

    def _expansion(self, text: str, start: int) -> tuple[str, int]:
        """Return the value of the expansion that begins at a position, and the position after it."""
        if text.startswith("$((", start):
            end = _end(text, start + 1, "(", ")")
            return self._arithmetic(text[start + 3 : end - 2], text[start:end]), end
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
            self._doubt(name, value, "its default in the script")
            if match[3] == "=":
                self.values[name] = value
        if value is None:
            return mark(f"{name}:-" if default == "" else name)
        return value if isinstance(value, str) else " ".join(value) if match[2] else value[0] if value else ""

    def _arithmetic(self, inner: str, source: str) -> str:
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda found: self._parameter(found[1], found[0]), inner)
        while match := re.search(r"\(([^()]*)\)", text):
            text = text.replace(match[0], _sum(match[1]))
        return _sum(text) or self._unknown(source)

    def _unknown(self, source: str) -> str:
        known = next((name for name, text in self.sources.items() if text == source and name.startswith("VALUE")), None)
        name = known or f"VALUE{sum(name.startswith('VALUE') for name in self.sources) + 1}"
        self.sources[name] = source
        return mark(name)


def plain(text: str) -> str:
    """Return a text with ${NAME} for marks."""
    return MARK.sub(lambda found: f"${{{found[1]}}}", text)


def take_options(
    words: Sequence[str], without_value: frozenset[str], short: Mapping[str, str] | None = None
) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Return the options at the beginning of some words, with `-` for `_` in their names, and the other words.

    Args:
        without_value: long names and letters of options without a value, or with one after `=` only.
        short: letter -> long name, if several letters may follow one dash.
    """
    rest, found = list(words), []
    while rest and rest[0].startswith("-") and rest[0].strip("-"):
        word = rest.pop(0)
        if word.startswith("--") or short is None:
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
        else:
            name, value = short.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = value
            if name in without_value and value:
                rest.insert(0, f"-{value}")
                equals = ""
        found.append((name, value if equals else None if name in without_value or not rest else rest.pop(0)))
    return found, rest


def shown(word: str) -> str:
    """Return a word as bash reads it. What is unknown is a variable that has to be set."""
    parts = MARK.split(word)
    return "".join(_form(part) if index % 2 else part and shlex.quote(part) for index, part in enumerate(parts)) or "''"


def _sum(text: str) -> str:
    """Return the value of sums and products of whole numbers; empty for anything else."""
    if not re.fullmatch(r"\s*-?\d+(\s*[-+*]\s*-?\d+)*\s*", text):
        return ""
    terms = re.findall(r"([-+]?)(-?\d+(?:\*-?\d+)*)", "".join(text.split()))
    return str(sum((-1 if sign == "-" else 1) * math.prod(map(int, term.split("*"))) for sign, term in terms))


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
