r"""Reward `math_verify`: the answer equals the reference answer according to the library Math-Verify.

The library parses LaTeX and plain notation with SymPy and compares symbolically: fractions, roots, sets, intervals,
matrices, equations. Its cost has no bound, and its own time limit needs the signal of the main thread. The function
therefore runs in worker processes, with its own limit of CPU time per completion.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attachments.graders.arithmetic import BOLD
from attachments.graders.choice_correctness import options as offered_options
from attachments.graders.math_eval import parse_quantity
from clotho.rewards.answer import answer_text
from clotho.rewards.registry import RewardFunction, RewardOptions
from protocols.errors import ProfileError
from protocols.prompt import Problem

MAX_CHARACTERS = 1000
"""The library receives the end of a longer answer. A longer reference is not an expression."""

MAX_DEPTH = 30
"""Nesting of brackets; the parser of the library is recursive."""

CPU_SECONDS = 1.0
"""CPU time for the comparison of one completion; an answer that needs more has reward 0."""

DELIMITER = re.compile(r"\$|\\\(|\\\[|\\boxed")
WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|sec|csc|log|exp|mod|gcd|lcm|max|min|sqrt|inf)\b)[A-Za-z]{3,}")
IN_TEXT = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\begin\{[a-z*]*\}|\\end\{[a-z*]*\}")
TOO_LARGE = re.compile(
    r"(?:\^|\*\*)\s*[({]?\s*[-+]?\d{4}|(?:\^|\*\*)[^\s+\-*/]{0,20}(?:\^|\*\*)|\d{4}\s*!|\d{500}|!\s*!"
)
"""A large exponent, a tower of powers, a factorial or a number that SymPy would compute in C, beyond any signal."""


class CpuTimeExceeded(BaseException):
    """The comparison of a completion takes too long. The library catches `Exception`, and passes this on."""


def load(options: RewardOptions) -> RewardFunction:
    """Return the reward function. Raises ProfileError if the library is not installed."""
    try:
        import math_verify
    except ImportError as error:
        raise ProfileError(
            'rewards.name "math_verify" needs the library Math-Verify: pip install "clotho[math-verify]"'
        ) from error
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)  # warns that its own time limits are off

    def parsed(text: str) -> list[Any]:
        found: list[Any] = math_verify.parse(_delimited(text), fallback_mode="no_fallback", parsing_timeout=None)
        return found

    def reward(problem: Problem, completion: str) -> float | None:
        """Return 1 if answer and completion are equal expressions, 0 if not; None if the answer is no expression."""
        if not _is_expression(problem):
            return None
        answer = answer_text(completion, options.answer_in)
        try:
            with _cpu_limit(CPU_SECONDS):
                gold = parsed(problem.answer)
                if not gold:
                    return None
                if answer is None:
                    return 0.0
                answer = BOLD.sub(r"\1", answer[-MAX_CHARACTERS:])
                if _too_large(answer) or _unfinished(problem, answer):
                    return 0.0
                return float(math_verify.verify(gold, parsed(answer), timeout_seconds=None))
        except CpuTimeExceeded:
            return 0.0

    math_verify.verify(parsed(r"\frac{1}{2}"), parsed("0.5"), timeout_seconds=None)  # builds the tables of its parser
    reward.__doc__ = __doc__
    return reward


def _is_expression(problem: Problem) -> bool:
    """Return whether a reference can be an expression: it is not free text, and not the letter of an option."""
    reference = problem.answer.strip()
    if not reference or len(reference) > MAX_CHARACTERS or _too_large(reference):
        return False
    if parse_quantity(reference) is not None or DELIMITER.search(reference):
        return True
    return reference not in offered_options(problem.prompt) and not WORD.search(IN_TEXT.sub("", reference))


def _too_large(text: str) -> bool:
    """Return whether the library would recurse deeply or compute huge numbers."""
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH or TOO_LARGE.search(text) is not None


def _unfinished(problem: Problem, answer: str) -> bool:
    """Return whether the answer is arithmetic that remains to be computed, such as a copy of the question."""
    reference, quantity = parse_quantity(problem.answer), parse_quantity(answer)
    return bool(reference and reference.finished and quantity and not quantity.finished)


def _delimited(text: str) -> str:
    """Return a text in which the library finds the expression: LaTeX needs delimiters, sentences stay as they are."""
    is_sentence = WORD.search(IN_TEXT.sub("", text))
    return text if DELIMITER.search(text) or is_sentence else f"${text.strip().rstrip('.')}$"


AGAIN_SECONDS = 0.1
"""CPU time until the limit is enforced again: Python ignores exceptions in callbacks of its garbage collector."""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuTimeExceeded in the body after this CPU time, and again if that was lost in the garbage collection.

    Works in the main thread of a process.
    """
    before = signal.signal(signal.SIGVTALRM, _exceeded)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _exceeded(number: int, frame: object) -> None:
    raise CpuTimeExceeded
