"""What the engine drew for clients of the HTTP API: remembered so that the learner gets the truth, not what comes back.

An environment sends tokens and rewards; whether it sends log-probabilities too, and rightly, is up to it. The engine
knows them, and which weights drew each token under which law.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from threading import Lock

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from protocols.sampling import MAX_SUPPORT, Completion, FinishReason, SampleRequest, Sampling

TOKEN_BYTES, SUPPORT_BYTES, COMPLETION_BYTES = 8, 40, 256
"""What a token takes; a support, and a completion, beside what is in it."""


class Drawn(Struct, frozen=True, kw_only=True, eq=False):
    """One completion as it was drawn.

    logprobs: natural logs under the law that each token was really drawn from. versions: the weights that drew it.
    supports: as in `Completion`. asker: label of the client that asked for it, empty if it gave none.
    unlearnable: why the learner cannot evaluate that law; empty if it can.
    """

    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: float
    supports: tuple[bytes, ...]
    finish_reason: FinishReason
    asker: str
    unlearnable: str


class _Kept(Struct, frozen=True, gc=False):
    logprobs: bytes
    versions: bytes
    temperature: float
    supports: tuple[bytes, ...]
    finish_reason: FinishReason
    asker: str
    unlearnable: str

    @property
    def cost(self) -> int:
        """In tokens."""
        supports = sum(map(len, self.supports)) + SUPPORT_BYTES * len(self.supports)
        return len(self.versions) // 4 + (supports + COMPLETION_BYTES) // TOKEN_BYTES


class DrawnLog:
    """The latest completions, found again by their tokens and those before; all methods may be called in any thread.

    Of equal completions of equal prompts the latest is remembered, though never one that cannot be learnt from in place
    of one that can: a test at temperature 0 may repeat what was drawn for training. The oldest are forgotten first.
    """

    def __init__(self, *, capacity_tokens: int = 2**20, logit_bias: Sequence[tuple[int, float]] = ()) -> None:
        """capacity_tokens: the bound, in tokens of 8 bytes; supports count, and each completion for 32 of its own.

        logit_bias: the run's own, which the learner evaluates.
        """
        self._capacity, self._bias = capacity_tokens, sorted(logit_bias)
        self._kept: dict[bytes, _Kept] = {}
        self._cost = 0
        self._lock = Lock()
        self._prompt: tuple[int, ...] = ()
        self._begun = _begun(())

    def remember(self, request: SampleRequest, completion: Completion, *, asker: str) -> None:
        """Remember a finished completion of a request; one that was aborted, or is larger than the log, is not."""
        kept = _Kept(
            array("f", completion.logprobs).tobytes(),
            array("i", completion.versions).tobytes(),
            request.sampling.temperature,
            completion.supports,
            completion.finish_reason,
            asker,
            unlearnable(request.sampling, recorded=bool(completion.supports), logit_bias=self._bias),
        )
        if completion.finish_reason == "abort" or kept.cost > self._capacity:
            return
        with self._lock:
            key = self._key(request.prompt, completion.tokens)
            before = self._kept.get(key)
            if before and kept.unlearnable and not before.unlearnable:
                return
            self._forget(key)
            self._kept[key] = kept
            self._cost += kept.cost
            while self._cost > self._capacity:
                self._forget(next(iter(self._kept)))

    def find(self, tokens: Sequence[int], start: int, end: int) -> Drawn | None:
        """Return `tokens[start:end]` as drawn after `tokens[:start]`: all of one completion, nothing more or less."""
        if not 0 <= start < end <= len(tokens):
            return None
        try:
            key = _ended(_begun(tokens[:start]), tokens[start:end])
        except (OverflowError, TypeError):
            return None  # no token of ours
        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            return None
        return Drawn(
            logprobs=np.frombuffer(kept.logprobs, dtype=np.float32),
            versions=np.frombuffer(kept.versions, dtype=np.int32),
            temperature=kept.temperature,
            supports=kept.supports,
            finish_reason=kept.finish_reason,
            asker=kept.asker,
            unlearnable=kept.unlearnable,
        )

    def _key(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> bytes:
        """The completions of one request come one after the other: their prompt is hashed once."""
        if prompt is not self._prompt:
            self._prompt, self._begun = prompt, _begun(prompt)
        return _ended(self._begun, tokens)

    def _forget(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._cost -= kept.cost


def unlearnable(sampling: Sampling, *, recorded: bool, logit_bias: Sequence[tuple[int, float]] = ()) -> str:
    """Return why the learner cannot evaluate the law that tokens were drawn from, or nothing if it can.

    recorded: what could have been drawn is known. logit_bias: the run's own, sorted.
    """
    if sampling.temperature == 0.0:
        return "drawn greedily, at temperature 0"
    if sampling.repetition_penalty != 1.0:
        return f"drawn with repetition_penalty {sampling.repetition_penalty:g}"
    if sorted(sampling.logit_bias) != logit_bias:
        return "drawn with another logit_bias than the run's"
    if cuts(sampling) and not recorded:
        return (
            f"drawn with top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}: what these leave "
            f"is recorded for a top_k of 1 to {MAX_SUPPORT}"
        )
    return ""


def cuts(sampling: Sampling) -> bool:
    """Tell whether tokens are drawn from a part of the vocabulary."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _begun(prompt: Sequence[int]) -> hashlib.blake2b:
    """Return the state of the hash after the prompt; its length comes first."""
    state = hashlib.blake2b(array("q", (len(prompt),)), digest_size=16)
    state.update(array("i", prompt))
    return state


def _ended(begun: hashlib.blake2b, tokens: Sequence[int]) -> bytes:
    state = begun.copy()
    state.update(array("i", tokens))
    return state.digest()
