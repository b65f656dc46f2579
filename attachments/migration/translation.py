"""Command lines of other trainers in the words of Clotho.

A flag whose words here mean the same in every system that the command line can belong to is replaced. The others are
refused together, each with its replacement, and with the whole command line as it would be.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from attachments.migration.other_trainers import SYSTEMS, VALUE, Row, as_text, by_name, table, used_by
from protocols.errors import ProfileError, visible
from training_run.profile.program import announce_words, program


class Given(Struct, frozen=True, kw_only=True):
    """The words of a flag with its values on a command line. flag: empty for words before the first flag."""

    flag: str
    values: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name without dashes, with underscores."""
        return self.flag[2:].replace("-", "_")

    @property
    def text(self) -> str:
        """The value; of several values a list, and `true` for a flag without a value."""
        return (self.values[0] if len(self.values) == 1 else as_text(self.values)) if self.values else "true"


class Choice(Struct, frozen=True, kw_only=True):
    """What a flag means in some systems. problem: why a value does not carry over. before: words before the program."""

    words: tuple[str, ...]
    rows: tuple[Row, ...]
    problem: str = ""
    before: str = ""


class Translation(Struct, frozen=True, kw_only=True):
    """A command line in the words of Clotho. changed: the words that replaced others."""

    words: tuple[str, ...]
    changed: tuple[str, ...] = ()


class Dialect(Struct, frozen=True, kw_only=True):
    """The command line that words are translated to.

    command: of Clotho; empty for a run. own: whether a flag with its values is valid there. problem: why words are not
    valid; empty if they are. system, program: whose command line it was; empty if only its flags tell. flags: those
    that the program stands for.
    """

    command: str = ""
    own: Callable[[Given], bool] = lambda one: False
    problem: Callable[[Sequence[str]], str] = lambda words: ""
    system: str = ""
    program: str = ""
    flags: tuple[str, ...] = ()


def split(argv: Sequence[str]) -> list[Given]:
    """The flags of a command line with their values."""
    found: list[Given] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            found.append(Given(flag=flag, values=(value,) if equals else (), words=(word,)))
        elif found:
            last = found[-1]
            found[-1] = Given(flag=last.flag, values=(*last.values, word), words=(*last.words, word))
        else:
            found.append(Given(flag="", words=(word,)))
    return found


def translate(argv: Sequence[str], dialect: Dialect) -> Translation:
    """Replace the flags of other trainers. Raises ProfileError that names every flag that is not replaced.

    Without such a flag, words that are not valid stay: the parser of the command refuses them.
    """
    given = split(argv)
    foreign = [one for one in given if one.flag and not dialect.own(one) and one.name in by_name()]
    line = Line(given, foreign, dialect)
    words: list[str] = []
    changed: list[str] = []
    before: list[str] = []
    refused: list[str] = []
    invalid: list[str] = []
    for one in given:
        choices = line.choices(one) if one in foreign else []
        if not choices:
            words += one.words
            invalid += [dialect.problem(one.words)] if one.flag and not dialect.own(one) else []
        elif one.name not in line.over:
            if not line.accepts(one, choices):
                choices = [line.fitting(one, choice) for choice in choices]
                refused.append(_refusal(one, choices))
            there = [(other.flag, other.values) for other in split(words)]
            further = [other for other in split(choices[0].words) if (other.flag, other.values) not in there]
            new = [word for other in further for word in other.words]
            words, changed = [*words, *new], [*changed, *new]
            before += shlex.split(choices[0].before)
    words = [*_giving_way(dialect.flags, words), *words]
    if refused:
        whole = shlex.join([*before, *shlex.split(program()), *filter(None, [dialect.command]), *words])
        raise _error(refused, list(filter(None, invalid)), whole)
    return Translation(words=tuple(words), changed=tuple(changed))


def _error(refused: Sequence[str], invalid: Sequence[str], whole: str) -> ProfileError:
    """The error that names all flags. whole: the command line with all replacements."""
    flags = [*refused, *invalid]
    error = ProfileError(flags[0] if len(flags) == 1 else f"{len(flags)} flags of this command line are refused:")
    for note in flags if len(flags) > 1 else []:
        error.add_note(note)
    if not invalid:
        error.add_note(f"the whole command line: {whole}")
    return error


class Line:
    """A command line with flags of other trainers. foreign: these flags. over: names that have no effect."""

    def __init__(self, given: Sequence[Given], foreign: Sequence[Given], dialect: Dialect) -> None:
        self._dialect = dialect
        self._values = {one.name: one.text for one in given}
        names = {one.name for one in foreign}
        having = [system for system in SYSTEMS if all(_is_in(system, name) for name in names)]
        self._systems = [dialect.system] if dialect.system else having or list(SYSTEMS)
        self.over = {
            name for one in foreign for choice in self.choices(one) for row in choice.rows for name in row.over
        }

    def choices(self, one: Given) -> list[Choice]:
        """What a flag means in the systems that have all flags of the line; empty if it means nothing here."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for system in self._systems:
            rows = [row for row in by_name().get(one.name, ()) if one.name in row.names(system)]
            rows = [row for row in rows if row.applies(one.text, self._dialect.command, self._dialect.program)]
            if rows:
                best = max(rows, key=lambda row: sum(map(bool, (row.command, row.program, row.value))))
                same = found.setdefault(best.words(one.text, self._values), [])
                same += [best] if best not in same else []
        return [
            Choice(words=words, rows=tuple(rows), before=rows[0].before.replace("{}", one.text))
            for words, rows in found.items()
        ]

    def accepts(self, one: Given, choices: Sequence[Choice]) -> bool:
        """Whether a flag has one meaning, and that of its replacement."""
        return len(choices) == 1 and all(one.name in row.accepted for row in choices[0].rows)

    def fitting(self, one: Given, choice: Choice) -> Choice:
        """A choice of a refused flag whose words are valid: `VALUE` stands for a value that is not."""
        problem = "" if VALUE in choice.words else self._dialect.problem(choice.words)
        words = tuple(VALUE if problem and word == one.text else word for word in choice.words)
        return structs.replace(choice, words=words, problem=problem)


def _refusal(one: Given, choices: Sequence[Choice]) -> str:
    """A flag, its replacements, and the differences."""
    uses = []
    for choice in choices:
        use = f"use {shlex.join(choice.words)}" if choice.words else "leave it out"
        use = f"start with {choice.before}" if choice.before else use
        parts = (f"{use} (a flag of {used_by(choice.rows, one.name)})", choice.problem, choice.rows[0].note)
        uses.append("; ".join(filter(None, parts)))
    return f"{visible(shlex.join(one.words), 120)}: {'; or '.join(uses)}"


def _is_in(system: str, name: str) -> bool:
    return any(name in row.names(system) for row in by_name().get(name, ()))


def _giving_way(flags: Sequence[str], words: Sequence[str]) -> list[str]:
    """The flags of a program that a command line does not set itself; none if it names a profile."""
    there = {one.flag for one in split(words)}
    return [word for one in split(flags) if not {one.flag, "--profile"} & there for word in one.words]


def replaced_program(argv: Sequence[str], problem: Callable[[Sequence[str]], str]) -> list[str] | None:
    """The command line of an earlier program in the words of Clotho; None for any other command line.

    problem: as in `Dialect`, for the flags of a run. Words before the program, such as `uv run` and `python -m`, are
    dropped. Raises ProfileError for a program that Clotho does not replace, and as `translate`.
    """
    before = itertools.takewhile(lambda word: not word.startswith("--"), argv)
    words = [os.path.basename(one) for one in before]
    names = {one.name: one for one in table().program}
    number = next((number for number, word in enumerate(words) if word in names), None)
    if number is None:
        return None
    there = names[words[number]]
    if there.new is None:
        raise ProfileError(f"{there.name} is no program of Clotho; {there.note}")
    dialect = Dialect(
        command=there.command,
        own=lambda one: not _is_in(there.system, one.name),
        problem=problem if not there.command else lambda words: "",
        system=there.system,
        program=there.name,
        flags=there.flags,
    )
    found = translate(argv[number + 1 :], dialect)
    words = [*filter(None, [there.command]), *found.words]
    announce_words(words)
    return words
