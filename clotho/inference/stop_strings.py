"""Incremental detokenization with stop strings: text is returned once no later token can change it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from protocols.sampling import SampleRequest

REPLACEMENT = "\ufffd"
MAX_CHARACTER_TOKENS = 8
"""Number of tokens after which an incomplete character is accepted as it is; UTF-8 needs at most four bytes."""


class TokenDecoder(Protocol):
    """Converts tokens to text."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`, without special tokens unless they are requested."""


class IncrementalDetokenizer:
    """Decodes a completion token by token and finds the first stop string in it.

    text: everything decoded so far, without the stop string and what follows. stopped: the stop string, once found.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        stops: tuple[str, ...] = (),
        *,
        special: bool = False,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """special: `text` includes special tokens. include_stop: `text` ends with the stop string.

        min_tokens: stop strings are searched behind this many tokens.
        """
        self.text = ""
        self.stopped: str | None = None
        self._decode = partial(decoder.decode, skip_special_tokens=False) if special else decoder.decode
        self._stops = stops
        self._include_stop = include_stop
        self._longest = max((len(s) for s in stops), default=0)
        self._min_tokens = min_tokens
        self._searched_from = 0  # the character from which stop strings are searched
        self._tokens: list[int] = []
        self._context = 0  # start of the context tokens: decoders may join neighbouring tokens
        self._read = 0  # number of tokens whose text is in `text`
        self._sent = 0  # number of characters of `text` that were returned

    @classmethod
    def of(cls, decoder: TokenDecoder, request: SampleRequest) -> IncrementalDetokenizer:
        """Return the detokenizer of one completion of a request."""
        sampling = request.sampling
        return cls(
            decoder,
            sampling.stop,
            special=request.special_tokens,
            include_stop=request.include_stop,
            min_tokens=sampling.min_tokens,
        )

    def push(self, token: int) -> str:
        """Add a token; return the text that is final with it."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._context : self._read])
        grown = self._decode(self._tokens[self._context :])
        waiting = grown.endswith(REPLACEMENT) and len(self._tokens) - self._read < MAX_CHARACTER_TOKENS
        if len(grown) > len(known) and not waiting:
            self._context, self._read = self._read, len(self._tokens)
            self._add(grown[len(known) :])
        return self._final(len(self.text) - self._held())

    def finish(self) -> str:
        """End the completion; return the text that was held back."""
        if self.stopped is None:
            known = self._decode(self._tokens[self._context : self._read])
            grown = self._decode(self._tokens[self._context :])
            self._read = len(self._tokens)
            self._add(grown[len(known) :])
        return self._final(len(self.text))

    def _add(self, delta: str) -> None:
        start = max(self._searched_from, len(self.text) - self._longest + 1)
        self.text += delta
        if len(self._tokens) <= self._min_tokens:
            self._searched_from = len(self.text)
            return
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda f: f[0])
            self.text = self.text[: at + len(self.stopped) if self._include_stop else at]

    def _held(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        if self.stopped is not None:
            return 0
        most = min(self._longest - 1, len(self.text) - self._searched_from)
        for n in range(most, 0, -1):
            end = self.text[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0

    def _final(self, until: int) -> str:
        delta, self._sent = self.text[self._sent : until], max(self._sent, until)
        return delta
