"""Drafts of the next tokens of a row: from earlier completions of its prompt, or from the row's own tokens.

A draft is only a proposal. The engine samples every token from the policy, and uses the draft to compute several of
these samples in one forward pass: a bad draft costs time and never changes a completion.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from clotho.inference.scheduler import Row


class Drafted(NamedTuple):
    """A row that can have a draft: its slot, the tokens that it has sampled, and the maximum length of the draft."""

    slot: int
    row: Row
    tokens: NDArray[np.int32]
    most: int


class Drafter(Protocol):
    """Proposes the next tokens of rows, and observes which rows leave the batch."""

    def propose(self, rows: Sequence[Drafted]) -> dict[int, Sequence[int]]:
        """Return drafts by slot; a row without a guess has none."""
        ...

    def left(self, row: Row) -> None:
        """Forget what belongs to a row that has left the batch."""
        ...

    def finished(self, row: Row) -> None:
        """Observe a finished completion."""
        ...

    def beside(self) -> Drafter:
        """Return the drafter of a second batch, which knows the same completions."""
        ...


END = -1
"""Follows the last token of a stored completion; never a token identifier."""

MAX_POINTERS = 16
"""Maximum number of places in earlier completions that a row compares itself with; the newest are kept."""

MAX_COMPLETIONS = 64
"""A prompt with more stored completions keeps the newest half."""

MAX_PROMPTS = 65_536
"""Maximum number of prompts with stored completions."""

MIN_CONFIDENCE = 0.3
"""A draft ends before the token at which the estimated probability that all its tokens are accepted falls below this
value. The estimate is the product of the shares of earlier completions that agree with the draft."""


class PromptHistory:
    """Completions of one prompt, one after the other, and where each pair of tokens occurs.

    tokens: of all completions, each with `END` behind it. starts: first place of each completion. Places stay valid,
    because completions are only appended.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.starts: list[int] = []
        self._after: dict[tuple[int, int], list[int]] = {}

    def add(self, completion: Sequence[int]) -> None:
        """Append a completion."""
        place, before = len(self.tokens), END
        self.starts.append(place)
        for token in completion:
            place += 1
            self._after.setdefault((before, token), []).append(place)
            before = token
        self.tokens.extend(completion)
        self.tokens.append(END)

    def after(self, before: int, token: int) -> list[int]:
        """Return the newest places behind two tokens. before: `END` if the second is the first of a completion."""
        return self._after.get((before, token), [])[-MAX_POINTERS:]

    def newest_half(self) -> PromptHistory:
        """Return the history without the older half of its completions."""
        kept = PromptHistory()
        ends = [*self.starts[1:], len(self.tokens)]
        for start, end in list(zip(self.starts, ends, strict=True))[len(self.starts) // 2 :]:
            kept.add(self.tokens[start : end - 1])
        return kept


class HistoryStore:
    """Completions by weights and prompt, limited in tokens; the least recently used prompts leave first."""

    def __init__(self, limit: int) -> None:
        """limit: maximum number of stored tokens."""
        self.tokens = 0
        self._limit = limit
        self._histories: OrderedDict[tuple[str, tuple[int, ...]], PromptHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def of(self, weights: str, prompt: tuple[int, ...]) -> PromptHistory:
        """Return the history of a prompt, which then is the most recently used."""
        key = weights, prompt
        history = self._histories.setdefault(key, PromptHistory())
        self._histories.move_to_end(key)
        if len(self._histories) > MAX_PROMPTS:
            self.tokens -= len(self._histories.popitem(last=False)[1].tokens)
        return history

    def add(self, weights: str, prompt: tuple[int, ...], completion: Sequence[int]) -> None:
        """Store a completion, unless it is longer than the limit."""
        if len(completion) >= self._limit:
            return
        history = self.of(weights, prompt)
        before = len(history.tokens)
        if len(history.starts) >= MAX_COMPLETIONS:
            history = self._histories[weights, prompt] = history.newest_half()
        history.add(completion)
        self.tokens += len(history.tokens) - before
        while self.tokens > self._limit:
            self.tokens -= len(self._histories.popitem(last=False)[1].tokens)


class _Pointers:
    """The places in earlier completions that agree with the newest tokens of a row. seen: tokens of the row so far."""

    __slots__ = ("history", "places", "seen")

    def __init__(self, history: PromptHistory) -> None:
        self.history = history
        self.places = history.starts[-MAX_POINTERS:]
        self.seen = 0

    def advance(self, tokens: NDArray[np.int32]) -> None:
        """Follow the sampled tokens. If no place agrees any longer, search the newest two tokens."""
        held = self.history.tokens
        for token in tokens[self.seen :].tolist():
            self.places = [place + 1 for place in self.places if held[place] == token]
        self.seen = len(tokens)
        if not self.seen:
            self.places = self.history.starts[-MAX_POINTERS:]
        elif not self.places:
            before = int(tokens[-2]) if self.seen > 1 else END
            self.places = self.history.after(before, int(tokens[-1]))

    def draft(self, most: int) -> list[int]:
        """Return the continuation that most places agree on."""
        held, places, confidence = self.history.tokens, self.places, 1.0
        draft: list[int] = []
        while places and len(draft) < most:
            following = [held[place] for place in places]
            token = following[0]
            if following.count(token) < len(following):
                token = max(set(following), key=following.count)
                confidence *= following.count(token) / len(following)
                places = [place for place in places if held[place] == token]
            if token == END or confidence < MIN_CONFIDENCE:
                break
            draft.append(token)
            places = [place + 1 for place in places]
        return draft


class HistoryDrafter:
    """Drafts from earlier completions of the same prompt by the same weights.

    The places in earlier completions that agree with a row are followed token by token, and vote on the next tokens
    (SPEC-RL, arXiv:2509.23232, verifies one earlier completion; SuffixDecoding, arXiv:2411.04975, lets suffixes vote).
    Completions of requests in the background are stored when they end, so that the other rows of a group use them too.
    """

    def __init__(self, limit: int) -> None:
        """limit: maximum number of stored tokens."""
        self.store = HistoryStore(limit)
        self._rows: dict[int, _Pointers] = {}

    def propose(self, rows: Sequence[Drafted]) -> dict[int, Sequence[int]]:
        """Return the continuations that most earlier completions agree on."""
        return {one.slot: draft for one in rows if (draft := self._draft(one))}

    def _draft(self, drafted: Drafted) -> Sequence[int]:
        row = drafted.row
        pointers = self._rows.get(row.serial)
        if pointers is None:
            request = row.active.request
            pointers = self._rows[row.serial] = _Pointers(self.store.of(request.weights, request.prompt))
        pointers.advance(drafted.tokens)
        return pointers.draft(drafted.most)

    def left(self, row: Row) -> None:
        """Forget the places of a row."""
        self._rows.pop(row.serial, None)

    def finished(self, row: Row) -> None:
        """Store the completion of a request in the background."""
        request = row.active.request
        if request.background:
            self.store.add(request.weights, request.prompt, row.tokens)

    def beside(self) -> HistoryDrafter:
        """Return this drafter: it knows rows by their serial numbers."""
        return self


NGRAM_SIZES = (4, 3, 2)
"""Sizes of the n-grams that prompt lookup searches, in this order."""


class _NgramIndex:
    """The tokens of a row, prompt included, and the newest place behind each n-gram of them."""

    __slots__ = ("_after", "tokens")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            for size in NGRAM_SIZES:
                if len(self.tokens) >= size:
                    self._after[tuple(self.tokens[-size:])] = len(self.tokens)
            self.tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """Return what followed the longest n-gram at the end of the tokens when it occurred last."""
        for size in NGRAM_SIZES:
            place = self._after.get(tuple(self.tokens[-size:]))
            if place is not None and len(self.tokens) >= size:
                following = self.tokens[place : place + most]
                while len(following) < most:  # the tokens repeat themselves
                    following += following[: most - len(following)]
                return following
        return []


class PromptLookupDrafter:
    """Drafts from the tokens of the row itself, prompt and completion (prompt lookup decoding, Saxena 2023)."""

    def __init__(self) -> None:
        self._rows: dict[int, _NgramIndex] = {}

    def propose(self, rows: Sequence[Drafted]) -> dict[int, Sequence[int]]:
        """Return what followed the newest tokens when they occurred last."""
        return {one.slot: draft for one in rows if (draft := self._draft(one))}

    def _draft(self, drafted: Drafted) -> Sequence[int]:
        row, prompt = drafted.row, drafted.row.active.request.prompt
        index = self._rows.get(row.serial)
        if index is None:
            index = self._rows[row.serial] = _NgramIndex(prompt)
        index.extend(drafted.tokens[len(index.tokens) - len(prompt) :].tolist())
        return index.draft(drafted.most)

    def left(self, row: Row) -> None:
        """Forget the tokens of a row."""
        self._rows.pop(row.serial, None)

    def finished(self, row: Row) -> None:
        """Other rows do not use the completion."""

    def beside(self) -> PromptLookupDrafter:
        """Return this drafter: it knows rows by their serial numbers."""
        return self
