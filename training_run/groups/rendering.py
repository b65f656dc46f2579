"""Problems as prompts: rendered together at the start, or each when its group begins.

The prompts of a large dataset take minutes to render, and a run may use few of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar, overload

import msgspec

from clotho.data.problems import conversation
from clotho.models.tokenizer import Chat, ChatTokenizer
from protocols.errors import DatasetError, ModelError, RequestError, visible
from protocols.prompt import Problem
from training_run.profile.data import DataSection

T = TypeVar("T")

Say = Callable[[str], None]
"""Shows a line to the user."""

CHECKED = 1024
"""Number of prompts that are rendered at the start: all of a smaller dataset, and a sample of a larger one."""

CACHED = 1024
"""Number of prompts that are kept of those that were rendered on demand."""

BATCH = 1024
"""Number of prompts that are encoded together."""

PROGRESS_SECONDS = 5.0
"""Time after which a line says how many prompts are rendered, and between two such lines."""

TOKENS_PER_BYTE = 4
"""Prompts have fewer tokens for a byte of the problem: no token stands for less than a byte, and few normalizers or
templates lengthen a text."""


class OnDemand(Sequence[T]):
    """A sequence whose elements are made when they are read. Thread-safe if `make` is."""

    def __init__(self, first: Sequence[T], count: int, make: Callable[[int], T]) -> None:
        """first: elements that are made already. make: returns the element of an index behind them."""
        self._first, self._count, self._make = first, count, lru_cache(maxsize=CACHED)(make)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        place = range(self._count)[index]
        if isinstance(place, range):
            return [self[one] for one in place]
        return self._first[place] if place < len(self._first) else self._make(place)


class Rendered(NamedTuple):
    """Problems with their prompts, index by index, after the removal of long prompts.

    lengths: number of tokens of each prompt that was rendered at the start.
    """

    problems: Sequence[Problem]
    prompts: Sequence[tuple[int, ...]]
    lengths: Sequence[int]


class Renderer:
    """Renders problems with the system prompt and the chat template of a run. Thread-safe."""

    def __init__(self, data: DataSection, tokenizer: ChatTokenizer, say: Say) -> None:
        """say: shows how far a work is that takes long."""
        self._system, self._limit = data.system, data.max_prompt_tokens
        self._tokenizer, self._say = tokenizer, say

    def render(self, problems: Sequence[Problem], *, first: int | None = None) -> Rendered:
        """Render problems as prompts, and remove those with more than `data.max_prompt_tokens`.

        first: number of prompts that are kept; others are rendered when they are read, and now only to be measured if
        there is a limit. None: all. Raises ModelError, also when a prompt is read; DatasetError if no problem remains.
        """
        count = len(problems) if first is None else first
        kept: list[Problem] = []
        prompts: list[tuple[int, ...]] = []
        lengths: list[int] = []
        measured = problems if self._limit else problems[:count]
        for problem, prompt in zip(measured, self._all(measured), strict=True):
            if not self._limit or len(prompt) <= self._limit:
                kept.append(problem)
                lengths.append(len(prompt))
                if len(prompts) < count:
                    prompts.append(prompt)
        if measured and not kept:
            raise DatasetError(f"every prompt of a dataset has more than data.max_prompt_tokens = {self._limit} tokens")
        remaining = kept if self._limit else problems
        if len(prompts) == len(remaining):
            return Rendered(remaining, prompts, lengths)
        return Rendered(remaining, OnDemand(prompts, len(remaining), lambda i: self._one(remaining[i])), lengths)

    def render_for_training(self, problems: Sequence[Problem], *, longest: int) -> Rendered:
        """Render problems, those of a large dataset on demand.

        A sample of a large dataset is rendered now, and so are a problem of each kind that the template may treat in
        its own way, and all problems whose prompts may have more than `longest` tokens. Raises as `render`.
        """
        if len(problems) <= CHECKED:
            return self.render(problems)
        rendered = self.render(problems, first=0)
        if self._limit:
            return rendered
        kinds = {(tuple(m["role"] for m in one.messages), bool(one.tools)): one for one in problems}
        sample = [*problems[:: -(-len(problems) // CHECKED)], *kinds.values()]
        lengths = list(map(len, self._all(sample)))
        rest = (longest - max(lengths)) / TOKENS_PER_BYTE
        lengths += map(len, self._all([one for one in problems if self._bytes(one) > rest]))
        return rendered._replace(lengths=lengths)

    def references(self, rendered: Rendered, *, first: int | None = None) -> Sequence[tuple[int, ...]]:
        """Return the tokens of each reference completion after its prompt, in the form in which the policy writes it.

        The chat template renders it as the next message, up to the first token that ends a completion. Empty without a
        reference completion, and if the rendered conversation does not begin with the prompt. first: as in `render`.
        """

        def reference(index: int) -> tuple[int, ...]:
            return self._reference(rendered.problems[index], rendered.prompts[index])

        count = len(rendered.problems)
        return OnDemand([reference(i) for i in range(count if first is None else min(first, count))], count, reference)

    def _reference(self, problem: Problem, prompt: tuple[int, ...]) -> tuple[int, ...]:
        if not problem.completion:
            return ()
        messages = [*conversation(problem, self._system), {"role": "assistant", "content": problem.completion}]
        try:
            tokens = self._tokenizer.render_chat(messages, add_generation_prompt=False, tools=problem.tools)
        except RequestError:  # a template may refuse a message that it could render as text
            return ()
        rest = tokens[len(prompt) :] if tokens[: len(prompt)] == prompt else ()
        end = next((i + 1 for i, token in enumerate(rest) if token in self._tokenizer.eos_ids), len(rest))
        return rest[:end]

    def _all(self, problems: Sequence[Problem]) -> Iterator[tuple[int, ...]]:
        said = time.monotonic()
        for begin in range(0, len(problems), BATCH):
            if time.monotonic() >= said + PROGRESS_SECONDS:
                said = time.monotonic()
                self._say(f"rendering {len(problems):,} prompts: {100 * begin // len(problems)} %")
            try:
                yield from self._tokenizer.render_chats([self._chat(one) for one in problems[begin : begin + BATCH]])
            except RequestError as error:
                raise ModelError(f"the model's chat template cannot render the problems: {error}") from error

    def _one(self, problem: Problem) -> tuple[int, ...]:
        chat = self._chat(problem)
        try:
            return self._tokenizer.render_chat(chat.messages, tools=chat.tools)
        except RequestError as error:
            shown = visible(problem.prompt, 60)
            raise ModelError(f"the model's chat template cannot render the problem {shown!r}: {error}") from error

    def _chat(self, problem: Problem) -> Chat:
        return Chat(conversation(problem, self._system), problem.tools)

    def _bytes(self, problem: Problem) -> int:
        return len(msgspec.json.encode(self._chat(problem)))
