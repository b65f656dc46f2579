"""What a teacher says about completions, and whether it reads the same tokens as the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from msgspec import Struct

from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import ClothoError, ProfileError, RequestError, visible
from protocols.prompt import Problem

Tokens = tuple[int, ...]

PROBES = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "3.14159 * -271828 = ? (12,345,678)",
    "def f(x):\n\treturn {'a': [x ** 2, None]}  # comment\n\n\n",
    "Ünïcödé: Ελληνικά, русский, 日本語, العربية, 한국어 \U0001f642\u200d\u2642\ufe0f",
    "   leading, trailing and\u00a0unusual spaces \r\n ",
)
"""Texts on which tokenizers of other models differ: words, numbers, code, scripts and spaces."""

MAX_PROBED = 16
"""Number of problems whose texts are probes too."""


class TeacherError(ClothoError):
    """The teacher cannot score a group."""


class TeacherScores(Struct, frozen=True, kw_only=True):
    """What a teacher says about the tokens of one completion, in nats.

    logprobs: of each token, (T,). best: tokens with the highest log-probability at each position, with these, best
    first; empty if none were asked for. entropies: of the distributions at these positions; empty if not computed.
    """

    logprobs: tuple[float, ...]
    best: tuple[tuple[tuple[int, float], ...], ...] = ()
    entropies: tuple[float, ...] = ()


class GroupTeacher(Protocol):
    """Scores completions. retries: number of requests that were repeated."""

    retries: int

    async def score(self, prompt: Tokens, completions: Sequence[Tokens]) -> list[TeacherScores]:
        """Score the completions of a prompt, of which none is empty. Raises TeacherError."""


Encode = Callable[[Sequence[str]], Sequence[Tokens]]
"""Returns the tokens of texts, without the first token of each."""


def require_equal_tokens(tokenizer: ChatTokenizer, problems: Sequence[Problem], encode: Encode, teacher: str) -> None:
    """Raise ProfileError if a teacher encodes texts otherwise than the policy.

    Texts are the probes, and the prompts of the first problems as the policy reads them, with control tokens. encode:
    the teacher's. teacher: its name in the message.
    """
    texts = [*PROBES, *_prompts(tokenizer, problems)]
    for text, found in zip(texts, encode(texts), strict=True):
        own = tokenizer.encode(text)[1:]
        if tuple(found) != own:
            raise ProfileError(
                f"distillation.teacher {teacher} has another tokenizer than the policy: {visible(text, 60)!r} is "
                f"{len(found) + 1} tokens for it and {len(own) + 1} for the policy, or other ones; choose a teacher of "
                "the same family"
            )


def _prompts(tokenizer: ChatTokenizer, problems: Sequence[Problem]) -> Iterator[str]:
    for problem in islice(problems, MAX_PROBED):
        messages = problem.messages or [{"role": "user", "content": problem.prompt}]
        try:
            tokens = tokenizer.render_chat(messages, tools=problem.tools)
        except RequestError:  # plain prompts, or the start refuses the problem
            tokens = tokenizer.encode(problem.prompt)
        yield tokenizer.decode(tokens, skip_special_tokens=False)
