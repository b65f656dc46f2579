"""The command `sample`: completions of a policy, scored by the rewards of a profile, become demonstrations.

Conditions on rewards, and the best ones of each problem, say which are kept.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import anyio
import msgspec
from msgspec.structs import replace
from rich.console import Console

from clotho.data.problems import COMPLETION
from clotho.storage.atomic_files import replace_file
from protocols.errors import ProfileError, did_you_mean, visible
from training_run.commands.command_line import CommandParser, new_file
from training_run.commands.evaluate import outcomes_of
from training_run.evaluation.accuracy import Judged, Outcome
from training_run.profile.command_profiles import EvaluationArguments, load_evaluation
from training_run.records.terminal_text import print_line

OPERATORS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
        "<": operator.lt,
    }
)  # fmt: skip
CONDITION = re.compile(r"\s*([\w:./-]+)\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*")

REWARD, CORRECT, LENGTH = "reward", "correct", "length"
"""Names in a condition beside those of reward functions: the weighted sum, 1 or 0, and tokens of the completion."""


class Condition(NamedTuple):
    """A comparison of a value of a completion with a number."""

    name: str
    operator: str
    number: float

    def holds(self, one: Judged) -> bool:
        """Whether a completion fulfils the condition; one without the value does not."""
        value = values_of(one).get(self.name)
        return value is not None and OPERATORS[self.operator](value, self.number)


def values_of(one: Judged) -> dict[str, float | None]:
    """Return the values of a completion that conditions can name."""
    return {
        **one.grade.parts,
        REWARD: one.grade.reward,
        CORRECT: None if one.grade.correct is None else float(one.grade.correct),
        LENGTH: float(one.completion.length),
    }


def conditions(text: str) -> tuple[Condition, ...]:
    """Read conditions such as `reward >= 1 and length < 200`, all of which must hold. Raises ProfileError."""
    found = []
    for part in re.split(r"\band\b", text):
        match = CONDITION.fullmatch(part)
        if match is None:
            raise ProfileError(
                f"--keep {visible(text, 100)!r} is not a condition: write one such as 'reward >= 1', or several with "
                "'and' between them"
            )
        found.append(Condition(match[1], match[2], float(match[3])))
    return tuple(found)


def kept(outcome: Outcome, wanted: Sequence[Condition], *, limit: int) -> list[Judged]:
    """Return the best completions of a problem that fulfil all conditions, by their rewards, each text once.

    Of equal rewards, the shorter completion is first. Truncated completions are never kept: the policy would learn not
    to end. limit: largest number; 0: all.
    """
    found = [one for one in (outcome.greedy, *outcome.samples) if one.completion.finish_reason == "stop"]
    found = [one for one in found if all(condition.holds(one) for condition in wanted)]
    found.sort(key=lambda one: (-(one.grade.reward or 0.0), one.completion.length))
    first: dict[str, Judged] = {}
    for one in found:
        first.setdefault(one.completion.text, one)
    return list(first.values())[: limit or None]


SAMPLES = 8
"""Sampled completions per problem, if `--samples` names no other number."""


def parser() -> CommandParser:
    """Return the parser of the flags that `eval` does not have."""
    found = CommandParser(
        "sample",
        "Sample completions of a dataset, score them with the rewards of a profile, and write those that fulfil a "
        "condition as demonstrations for learner.objective = sft (rejection sampling). Further flags are those of "
        "eval, such as --profile, --adapter, --samples (8), --part (train), --limit and the keys of a profile; with "
        "--adapter the adapter samples, otherwise the base model.",
    )
    found.add_argument(
        "--keep",
        default="correct == 1",
        help="condition, or several with `and`: reward, correct, length, or the name of a reward, a comparison and a "
        "number (correct == 1)",
    )
    found.add_argument("--per-problem", type=int, default=1, help="most completions of a problem; 0: all (1)")
    found.add_argument("--output", default="", help="file of JSON lines to write; it must not exist")
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Sample, and write what is kept; return the exit status: 1 if nothing is kept. Raises ClothoError."""
    own, rest = _divided(argv)
    given = parser().parsed(own, console)
    if given is None:
        return 0
    if not given.output:
        raise ProfileError("sample needs a file to write: --output FILE.jsonl")
    output, wanted = new_file(given.output), conditions(given.keep)
    arguments = _arguments(rest)
    _require_names(wanted, arguments)
    must_judge = any(one.name == CORRECT for one in wanted)
    (outcomes,) = anyio.run(partial(outcomes_of, arguments, console, must_judge=must_judge)).values()
    chosen = [(outcome, kept(outcome, wanted, limit=given.per_problem)) for outcome in outcomes]
    lines = [line for outcome, found in chosen for line in _lines(outcome, [one.completion.text for one in found])]
    solved = sum(bool(found) for _, found in chosen)
    sampled = sum(1 + len(outcome.samples) for outcome in outcomes)
    print_line(console, f"kept {len(lines)} of {sampled} completions, for {solved} of {len(outcomes)} problems")
    if not lines:
        print_line(console, f"no file is written, because no completion fulfils --keep {given.keep!r}")
        return 1
    replace_file(output, lines)
    print_line(console, f"learn them with: --learner.objective sft --dataset {given.output}")
    return 0


def _divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of this command, and those of `eval`."""
    own: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.replace("_", "-").partition("=")
        if flag in ("-h", "--help"):
            own.append(flag)
        elif flag in ("--keep", "--per-problem", "--output"):
            own += [word] if equals else [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            rest.append(word)
    return own, rest


def _arguments(argv: Sequence[str]) -> EvaluationArguments:
    """Return the arguments of an evaluation of one policy on the problems for training."""
    found = load_evaluation([*(() if _names(argv, "--part") else ("--part", "train")), *argv])
    if len(found.adapters) > 1:
        raise ProfileError("sample writes the completions of one policy: name one --adapter")
    flags = replace(found.flags, base=not found.adapters)
    return replace(found, flags=flags if _names(argv, "--samples") else replace(flags, samples=SAMPLES))


def _names(argv: Sequence[str], flag: str) -> bool:
    return any(word.partition("=")[0] == flag for word in argv)


def _require_names(wanted: Sequence[Condition], arguments: EvaluationArguments) -> None:
    names = [REWARD, CORRECT, LENGTH, *(reward.name for reward in arguments.profile.rewards)]
    if unknown := [one.name for one in wanted if one.name not in names]:
        hint = did_you_mean(unknown[0], names) or f"; there are {', '.join(names)}"
        raise ProfileError(f"--keep: no reward has the name {unknown[0]!r}{hint}")


def _lines(outcome: Outcome, texts: Sequence[str]) -> Iterator[bytes]:
    """Yield the record of a problem with each completion, in the place of a completion that it had."""
    columns: Mapping[str, Any] = outcome.problem.extra or {"prompt": outcome.problem.prompt}
    for text in texts:
        yield msgspec.json.encode({**columns, COMPLETION: text}) + b"\n"
