"""The tokens of a session: rows that only grow, of which nothing is tokenized twice.

A row begins with the prompt of an answer. The next answer belongs to it if its prompt begins with all tokens of the
row, as the sampler recorded them; what the prompt adds is context. A client sends the history as text, whose tokens may
be others than those that were sampled, and which lacks control tokens within an answer. A prompt whose text begins with
that of the row gets the tokens of the row. Any other prompt, for example of a template that writes earlier answers
otherwise, begins a further row (a fork).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from msgspec import Struct, structs

from clotho.serving.services import Tokenizer
from protocols.sampling import Completion, ExpertRoutes, SampleRequest, grown_routes, turns_of

TOKEN_BYTES = 96
"""Bytes of a token with its log-probability, its version and what Python adds, without supports and routes."""


class SessionAnswer(Struct, frozen=True, kw_only=True, eq=False):
    """One answer of the policy in its row. start: index of its first token there."""

    row: SessionRow
    start: int
    completion: Completion

    @property
    def end(self) -> int:
        """Index behind its last token."""
        return self.start + len(self.completion.tokens)

    @property
    def support_bytes(self) -> int:
        """Number of bytes of the tokens from which its own were sampled."""
        return sum(map(len, self.completion.supports))


class SessionRow:
    """One growing sequence of tokens.

    All its answers have one temperature, and all or none recorded from which tokens they were sampled.
    routes: of all tokens but the last; None if they were not recorded.
    """

    def __init__(self, request: SampleRequest, completion: Completion) -> None:
        self.tokens = array("i")
        self.routes: ExpertRoutes | None = None
        self._answers: list[tuple[int, int]] = []
        self._support_bytes = 0
        self._kind = _kind(request, completion)

    def continues_with(self, request: SampleRequest, completion: Completion) -> bool:
        """Whether the prompt of an answer begins with the tokens of the row."""
        return self._kind == _kind(request, completion) and self._begins(request.prompt)

    def _begins(self, prompt: Sequence[int]) -> bool:
        size = len(self.tokens)
        return len(prompt) >= size and prompt[size - 1] == self.tokens[-1] and array("i", prompt[:size]) == self.tokens

    def as_sampled(self, prompt: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return a prompt with the tokens of the row for its first text; empty if it does not begin with that text."""
        if self._begins(prompt):
            return prompt
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        text = decode(self._shown(tokenizer))
        end = bisect_left(range(len(prompt)), len(text), key=lambda size: len(decode(prompt[:size])))
        return (*self.tokens, *prompt[end:]) if decode(prompt[:end]) == text else ()

    def _shown(self, tokenizer: Tokenizer) -> array[int]:
        """Return the tokens that clients see: control tokens within an answer have no text in it."""
        shown, end = array("i"), 0
        for start, stop in self._answers:
            shown += self.tokens[end:start]
            shown.extend(token for token in self.tokens[start : stop - 1] if tokenizer.decode([token]))
            shown.append(self.tokens[stop - 1])
            end = stop
        return shown

    def add(self, request: SampleRequest, completion: Completion) -> SessionAnswer:
        """Add an answer, with what its prompt adds to the row."""
        self.tokens.extend(request.prompt[len(self.tokens) :])
        self.routes = grown_routes(self.routes, completion.routes)
        answer = SessionAnswer(row=self, start=len(self.tokens), completion=structs.replace(completion, routes=None))
        self.tokens.extend(completion.tokens)
        self._answers.append((answer.start, answer.end))
        self._support_bytes += answer.support_bytes
        return answer

    @property
    def size(self) -> int:
        """Number of bytes that are kept."""
        routes = len(self.routes.experts) if self.routes else 0
        return TOKEN_BYTES * len(self.tokens) + self._support_bytes + routes

    @property
    def temperature(self) -> float:
        """The sampling temperature of all answers."""
        return self._kind[0]


def _kind(request: SampleRequest, completion: Completion) -> tuple[float, bool]:
    return request.sampling.temperature, bool(completion.supports)


class Trajectory(Struct, frozen=True, kw_only=True, eq=False):
    """A row up to its last rewarded answer. answers: those that are trained on, in order; at least one."""

    answers: tuple[SessionAnswer, ...]

    @property
    def tokens(self) -> array[int]:
        """All tokens."""
        return self.answers[0].row.tokens[: self.answers[-1].end]

    @property
    def size(self) -> int:
        """Number of bytes that are kept; those of the routes are of the row."""
        routes = self.answers[0].row.routes
        supports = sum(answer.support_bytes for answer in self.answers)
        return TOKEN_BYTES * self.answers[-1].end + supports + (len(routes.experts) if routes else 0)

    @property
    def routes(self) -> ExpertRoutes | None:
        """The routes of all tokens but the last."""
        routes, inputs = self.answers[0].row.routes, self.answers[-1].end - 1
        return routes and structs.replace(routes, experts=routes.experts[: inputs * routes.token_bytes])

    def completion(self, shared: int, *, decode: Callable[[Sequence[int]], str], reward: float) -> Completion:
        """Return the sequence behind its first `shared` tokens, which all sequences of its group have."""
        tokens = tuple(self.tokens[shared:])
        logprobs, sampled = [0.0] * len(tokens), [False] * len(tokens)
        versions = [self.answers[0].completion.versions[0]] * len(tokens)
        supports = [b""] * len(tokens)
        for answer in self.answers:
            completion, start, end = answer.completion, answer.start - shared, answer.end - shared
            logprobs[start:end], sampled[start:end] = completion.logprobs, [True] * (end - start)
            versions[start:end] = completion.versions
            versions[end:] = completion.versions[-1:] * (len(tokens) - end)
            supports[start:end] = completion.supports or supports[start:end]
        text = decode(tokens)
        return Completion(
            tokens=tokens,
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            sampled=() if all(sampled) else tuple(sampled),
            supports=tuple(supports) if any(supports) else (),
            routes=self.routes,
            turns=turns_of(tokens, sampled, text, decode),
            text=text,
            finish_reason=self.answers[-1].completion.finish_reason,
            reward=reward,
        )


def trajectories(answers: Sequence[SessionAnswer]) -> tuple[Trajectory, ...]:
    """Return the rows of answers, each with those of the answers that it has."""
    rows = dict.fromkeys(answer.row for answer in answers)
    return tuple(Trajectory(answers=tuple(one for one in answers if one.row is row)) for row in rows)


def common_prefix(found: Sequence[Trajectory]) -> int:
    """Return the number of first tokens that all sequences share, and of which none was sampled."""
    end = min(sequence.answers[0].start for sequence in found)
    columns = zip(*(sequence.tokens[:end] for sequence in found), strict=True)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
