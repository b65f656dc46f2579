"""Text of a completion, token by token: nothing is said that a later token could still change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 8
"""Tokens after which bytes that still make no character are taken as they are; UTF-8 needs at most four."""


class Decoder(Protocol):
    """What turns tokens into text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens."""
        ...


class TextTracker:
    """Decodes a completion as it grows and finds the first stop string in it.

    `text` is everything decoded so far, cut before the stop string once `stopped` names it.
    """

    def __init__(self, decoder: Decoder, stops: tuple[str, ...] = ()) -> None:
        self.text = ""
        self.stopped: str | None = None
        self._decoder = decoder
        self._stops = stops
        self._longest = max((len(s) for s in stops), default=0)
        self._tokens: list[int] = []
        self._context = 0  # start of the tokens decoded as context: some decoders join neighbours
        self._read = 0  # tokens whose text is in `text`
        self._sent = 0  # characters of `text` given out

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain with it."""
        self._tokens.append(token)
        known = self._decoder.decode(self._tokens[self._context : self._read])
        grown = self._decoder.decode(self._tokens[self._context :])
        waiting = grown.endswith(REPLACEMENT) and len(self._tokens) - self._read < LONGEST_CHARACTER
        if len(grown) > len(known) and not waiting:
            self._context, self._read = self._read, len(self._tokens)
            self._add(grown[len(known) :])
        return self._certain(len(self.text) - self._held())

    def finish(self) -> str:
        """End the completion; return the text that was still held back."""
        if self.stopped is None:
            known = self._decoder.decode(self._tokens[self._context : self._read])
            grown = self._decoder.decode(self._tokens[self._context :])
            self._read = len(self._tokens)
            self._add(grown[len(known) :])
        return self._certain(len(self.text))

    def _add(self, delta: str) -> None:
        start = max(0, len(self.text) - self._longest + 1)
        self.text += delta
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda f: f[0])
            self.text = self.text[:at]

    def _held(self) -> int:
        """Characters at the end that may still become a stop string."""
        if self.stopped is not None:
            return 0
        most = min(self._longest - 1, len(self.text))
        for n in range(most, 0, -1):
            end = self.text[-n:]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0

    def _certain(self, until: int) -> str:
        delta, self._sent = self.text[self._sent : until], max(self._sent, until)
        return delta
