"""What the engine drew for clients of the HTTP API: remembered so that the learner gets the truth, not what comes back.

An environment sends tokens and rewards; whether it sends log-probabilities too, and rightly, is up to it. The engine
knows them, and which weights drew each token under which distribution.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from itertools import count
from threading import Lock

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from protocols.sampling import (
    Completion,
    FinishReason,
    SampleRequest,
    Sampling,
    can_record_support,
    in_use,
    restricts_support,
    unlearnable,
)

TOKEN_BYTES, SUPPORT_BYTES, COMPLETION_BYTES = 8, 40, 256
"""What a token takes; a support, and a completion, beside what is in it."""

DECIMALS = 3
"""Of log-probabilities, beyond which equal draws differ by what else was in their batches."""

MOST_EQUAL = 16
"""So many draws of the same tokens after the same tokens are told apart."""


class SampledCompletion(Struct, frozen=True, kw_only=True, eq=False):
    """One completion as it was sampled.

    logprobs: natural logarithms under the distribution that each token was sampled from. versions: the policy version
        that sampled each token.
    supports: as in `Completion`. client_label: label of the client that asked for it, empty if it gave none.
    unlearnable: why the learner cannot evaluate that distribution; empty if it can.
    """

    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: float
    supports: tuple[bytes, ...]
    finish_reason: FinishReason
    client_label: str
    unlearnable: str


class _Kept(Struct, frozen=True, gc=False):
    key: bytes
    logprobs: bytes
    versions: bytes
    temperature: float
    supports: tuple[bytes, ...]
    finish_reason: FinishReason
    client_label: str
    unlearnable: str

    @property
    def cost(self) -> int:
        """In tokens."""
        supports = sum(map(len, self.supports)) + SUPPORT_BYTES * len(self.supports)
        return len(self.versions) // 4 + (supports + COMPLETION_BYTES) // TOKEN_BYTES

    @property
    def draw(self) -> tuple[object, ...]:
        """What equal draws have in common beside the tokens.

        Log-probabilities are among it, up to rounding: of two draws by the same weights one may have been begun, and
        its prompt computed, by the weights before (`engine.kv_policy = "keep"`).
        """
        rounded = np.frombuffer(self.logprobs, dtype=np.float32).round(DECIMALS).tobytes()
        return rounded, self.versions, self.temperature, self.supports, self.unlearnable, self.client_label

    def sampled(self) -> SampledCompletion:
        """As those who find it see it."""
        return SampledCompletion(
            logprobs=np.frombuffer(self.logprobs, dtype=np.float32),
            versions=np.frombuffer(self.versions, dtype=np.int32),
            temperature=self.temperature,
            supports=self.supports,
            finish_reason=self.finish_reason,
            client_label=self.client_label,
            unlearnable=self.unlearnable,
        )


class SampleLog:
    """The latest completions, found again by their tokens and those before; all methods may be called in any thread.

    Of equal completions of equal prompts the latest is remembered, though never one that cannot be learned from in place
    of one that can: a test at temperature 0 may repeat what was sampled for training. The oldest are forgotten first.
    """

    def __init__(self, *, capacity_tokens: int = 2**20, logit_bias: Sequence[tuple[int, float]] = ()) -> None:
        """capacity_tokens: the bound, in tokens of 8 bytes; supports count, and each completion for 32 of its own.

        logit_bias: the run's own, which the learner evaluates.
        """
        self._capacity, self._bias = capacity_tokens, sorted(logit_bias)
        self._kept: dict[int, _Kept] = {}  # by serial number, the oldest first
        self._equal: dict[bytes, list[int]] = {}
        self._serial = count()
        self._cost = 0
        self._lock = Lock()
        self._prompt: tuple[int, ...] = ()
        self._begun = _begun(())

    def remember(self, request: SampleRequest, completion: Completion, *, client_label: str) -> None:
        """Remember a finished completion of a request; one that was aborted, or is larger than the log, is not."""
        if completion.finish_reason == "abort":
            return
        with self._lock:
            kept = _Kept(
                self._key(request.prompt, completion.tokens),
                array("f", completion.logprobs).tobytes(),
                array("i", completion.versions).tobytes(),
                request.sampling.temperature,
                completion.supports,
                completion.finish_reason,
                client_label,
                unlearnable_reason(request.sampling, support_recorded=bool(completion.supports), logit_bias=self._bias),
            )
            if kept.cost > self._capacity:
                return
            equal = self._equal.setdefault(kept.key, [])
            equal.append(next(self._serial))
            self._kept[equal[-1]] = kept
            self._cost += kept.cost
            same = [number for number in equal[:-1] if self._kept[number].draw == kept.draw]
            for number in same or equal[:-MOST_EQUAL]:
                self._forget(number)
            while self._cost > self._capacity:
                self._forget(next(iter(self._kept)))

    def find(
        self, tokens: Sequence[int], start: int, end: int, *, logprobs: NDArray[np.float64] | None = None
    ) -> SampledCompletion | None:
        """Return `tokens[start:end]` as sampled after `tokens[:start]`: all of one completion, nothing more or less.

        Of several equal ones it is that whose log-probabilities are nearest to `logprobs`, or the latest; one that the
        learner cannot evaluate only if there is no other.
        """
        if not 0 <= start < end <= len(tokens):
            return None
        try:
            key = _ended(_begun(tokens[:start]), tokens[start:end])
        except (OverflowError, TypeError):
            return None  # no token of ours
        with self._lock:
            found = [self._kept[number].sampled() for number in reversed(self._equal.get(key, ()))]
        found = [sampled for sampled in found if not sampled.unlearnable] or found
        if len(found) > 1 and logprobs is not None:
            return min(found, key=lambda sampled: float(np.abs(sampled.logprobs - logprobs).max()))
        return found[0] if found else None

    def _key(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> bytes:
        """The completions of one request come one after the other: their prompt is hashed once."""
        if prompt is not self._prompt:
            self._prompt, self._begun = prompt, _begun(prompt)
        return _ended(self._begun, tokens)

    def _forget(self, number: int) -> None:
        kept = self._kept.pop(number)
        self._cost -= kept.cost
        equal = self._equal[kept.key]
        equal.remove(number)
        if not equal:
            del self._equal[kept.key]


def unlearnable_reason(
    sampling: Sampling, *, support_recorded: bool, logit_bias: Sequence[tuple[int, float]] = ()
) -> str:
    """Return why the learner cannot evaluate the distribution that a completion was sampled from; empty if it can.

    support_recorded: the completion carries its supports. logit_bias: that of the run, sorted.
    """
    if (found := unlearnable(sampling)) is not None:
        return found.reason
    if sorted(sampling.logit_bias) != sorted(logit_bias):
        return "logit_bias differs from that of the run"
    if restricts_support(sampling) and not support_recorded:
        return f"{', '.join(in_use(sampling, learner='replays support'))}: the supports were not recorded"
    return ""


def token_cost(sampling: Sampling) -> int:
    """Return the maximum size of one token in the log, in tokens of 8 bytes: the token and its recorded support."""
    support = SUPPORT_BYTES + 4 * sampling.top_k if can_record_support(sampling) else 0
    return 1 + -(-support // TOKEN_BYTES)


def _begun(prompt: Sequence[int]) -> hashlib.blake2b:
    """Return the state of the hash after the prompt; its length comes first."""
    state = hashlib.blake2b(array("q", (len(prompt),)), digest_size=16)
    state.update(array("i", prompt))
    return state


def _ended(begun: hashlib.blake2b, tokens: Sequence[int]) -> bytes:
    state = begun.copy()
    state.update(array("i", tokens))
    return state.digest()
