"""The sample log: completions sampled for API clients, with the log-probabilities at which they were sampled.

An environment returns tokens and rewards. Whether it returns correct log-probabilities depends on the environment; the
engine knows them, and which policy version sampled each token under which distribution. What the log lacks is taken
from the environment.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from threading import Lock

import numpy as np
import structlog
from msgspec import Struct, structs
from numpy.typing import NDArray
from starlette.requests import Request

from attachments.atropos.validation import CheckedGroup, InvalidGroup, first_index
from clotho.serving.auth import client_of
from clotho.serving.services import Recording
from protocols.learnability import unlearnable_completion
from protocols.sampling import (
    BASE,
    MIN_LOGPROB,
    POLICY,
    Completion,
    ExpertRoutes,
    FinishReason,
    SampleRequest,
    Sampling,
    can_record_support,
    grown_routes,
)

log = structlog.get_logger(actor="server")

TOKEN_BYTES, SUPPORT_BYTES, COMPLETION_BYTES = 8, 40, 256
"""Size in bytes of a token, and the overhead of a support and of a completion."""

DECIMALS = 3
"""Log-probabilities of equal samples agree to this many decimals; beyond, they depend on the rest of the batch."""

MAX_ROUTE_BYTES = 2**29
"""Maximum size of the routes in the log, those of completions included that have left it since."""

MAX_EQUAL = 16
"""Maximum number of completions with the same prompt and tokens that are kept."""


class SampledCompletion(Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One completion and how it was sampled.

    key: of its prompt and tokens. logprob_bytes, version_bytes: float32 and int32 per token. supports: as in
    `Completion`. client_label: label of the client that requested it; empty if it gave none. unlearnable: why the
    learner cannot evaluate the distribution that it was sampled from; empty if it can. routes: as in `Completion`; None
    if the log has dropped them.
    """

    key: bytes
    logprob_bytes: bytes
    version_bytes: bytes
    temperature: float
    supports: tuple[bytes, ...]
    finish_reason: FinishReason
    client_label: str
    unlearnable: str
    routes: ExpertRoutes | None

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Natural logarithms under the distribution that each token was sampled from."""
        return np.frombuffer(self.logprob_bytes, dtype=np.float32)

    @property
    def versions(self) -> NDArray[np.int32]:
        """The policy version that sampled each token."""
        return np.frombuffer(self.version_bytes, dtype=np.int32)

    @property
    def cost(self) -> int:
        """Size in tokens."""
        supports = sum(map(len, self.supports)) + SUPPORT_BYTES * len(self.supports)
        return len(self.version_bytes) // 4 + (supports + COMPLETION_BYTES) // TOKEN_BYTES

    @property
    def sample_key(self) -> tuple[object, ...]:
        """Key of equal samples of the same tokens.

        It contains the rounded log-probabilities, because the KV cache of one of two samples may have been computed by
        an earlier policy version (`engine.kv_policy = "keep"`).
        """
        rounded = self.logprobs.round(DECIMALS).tobytes()
        return rounded, self.version_bytes, self.temperature, self.supports, self.unlearnable, self.client_label


class SampleLog:
    """The latest completions, by prompt and tokens. Thread-safe.

    Completions of adapters and of the base model are not stored, because the policy did not sample them.
    A completion that the learner cannot evaluate never replaces an equal one that it can: an evaluation at
    temperature 0 may repeat a completion sampled for training. The oldest completions are removed first.
    """

    def __init__(self, *, capacity_tokens: int = 2**20, logit_bias: Sequence[tuple[int, float]] = ()) -> None:
        """capacity_tokens: maximum size in tokens of 8 bytes; supports count, and each completion counts 32 more.

        logit_bias: logit bias of the run, which the learner evaluates.
        """
        self._capacity, self._bias = capacity_tokens, sorted(logit_bias)
        self._entries: dict[int, SampledCompletion] = {}  # by serial number, oldest first
        self._equal: dict[bytes, list[int]] = {}
        self._serial = count()
        self._cost = 0
        self._route_bytes = 0
        self._routed: deque[tuple[int, int]] = deque()  # serial numbers and bytes of completions with routes
        self._lock = Lock()
        self._base_clients: set[str] = set()
        self._prompt: tuple[int, ...] = ()
        self._prompt_hash = _hash_prompt(())

    async def begin(self, http: Request, _: Sequence[SampleRequest]) -> Recording:
        """Record the completions of a request under the label of its client."""
        return Recording(remember=partial(self.remember, client_label=client_of(http.scope).label))

    def remember(self, request: SampleRequest, completion: Completion, *, client_label: str) -> None:
        """Store a finished completion of the policy, unless it was aborted or is larger than the log.

        The first completion of the base model for each client is a warning in the event log.
        """
        if request.weights == BASE and client_label not in self._base_clients:
            self._base_clients.add(client_label)
            log.warning(
                "base_model_requested",
                client=client_label,
                hint="the base model answers this name, without the adapter that is trained, and its completions are "
                "not trained on: name the model `policy`, or no model",
            )
        if completion.finish_reason == "abort" or request.weights != POLICY:
            return
        with self._lock:
            entry = SampledCompletion(
                key=self._key(request.prompt, completion.tokens),
                logprob_bytes=array("f", completion.logprobs).tobytes(),
                version_bytes=array("i", completion.versions).tobytes(),
                temperature=request.sampling.temperature,
                supports=completion.supports,
                finish_reason=completion.finish_reason,
                client_label=client_label,
                unlearnable=unlearnable_completion(request, completion, logit_bias=self._bias),
                routes=completion.routes,
            )
            if entry.cost > self._capacity:
                return
            equal = self._equal.setdefault(entry.key, [])
            equal.append(next(self._serial))
            self._entries[equal[-1]] = entry
            self._cost += entry.cost
            self._bound_routes(equal[-1], completion.routes)
            same = [number for number in equal[:-1] if self._entries[number].sample_key == entry.sample_key]
            for number in same or equal[:-MAX_EQUAL]:
                self._remove(number)
            while self._cost > self._capacity:
                self._remove(next(iter(self._entries)))

    def find(
        self, tokens: Sequence[int], start: int, end: int, *, logprobs: NDArray[np.float64] | None = None
    ) -> SampledCompletion | None:
        """Return the completion `tokens[start:end]` of the prompt `tokens[:start]`; None if it is not in the log.

        Of several equal completions, returns the one whose log-probabilities are closest to `logprobs`, or the latest.
        Completions that the learner cannot evaluate are returned only if there is no other.
        """
        if not 0 <= start < end <= len(tokens):
            return None
        try:
            key = _hash_completion(_hash_prompt(tokens[:start]), tokens[start:end])
        except (OverflowError, TypeError):
            return None  # not token identifiers
        with self._lock:
            found = [self._entries[number] for number in reversed(self._equal.get(key, ()))]
        found = [sampled for sampled in found if not sampled.unlearnable] or found
        if len(found) > 1 and logprobs is not None:
            return min(found, key=lambda sampled: float(np.abs(sampled.logprobs - logprobs).max()))
        return found[0] if found else None

    def _key(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> bytes:
        """Return the key of a completion. The prompt of consecutive completions of one request is hashed once."""
        if prompt is not self._prompt:
            self._prompt, self._prompt_hash = prompt, _hash_prompt(prompt)
        return _hash_completion(self._prompt_hash, tokens)

    def _bound_routes(self, number: int, routes: ExpertRoutes | None) -> None:
        """Add the routes of a completion, and drop the oldest beyond `MAX_ROUTE_BYTES`."""
        if routes is None:
            return
        self._routed.append((number, len(routes.experts)))
        self._route_bytes += len(routes.experts)
        while self._route_bytes > MAX_ROUTE_BYTES:
            oldest, size = self._routed.popleft()
            self._route_bytes -= size
            if oldest in self._entries:
                self._entries[oldest] = structs.replace(self._entries[oldest], routes=None)

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._cost -= entry.cost
        equal = self._equal[entry.key]
        equal.remove(number)
        if not equal:
            del self._equal[entry.key]


def token_cost(sampling: Sampling) -> int:
    """Return the maximum size of one token in the log, in tokens of 8 bytes: the token and its recorded support."""
    support = SUPPORT_BYTES + 4 * sampling.top_k if can_record_support(sampling) else 0
    return 1 + -(-support // TOKEN_BYTES)


def _hash_prompt(prompt: Sequence[int]) -> hashlib.blake2b:
    """Return the hash state after the length and the tokens of the prompt."""
    state = hashlib.blake2b(array("q", (len(prompt),)), digest_size=16)
    state.update(array("i", prompt))
    return state


def _hash_completion(prompt_hash: hashlib.blake2b, tokens: Sequence[int]) -> bytes:
    state = prompt_hash.copy()
    state.update(array("i", tokens))
    return state.digest()


MAX_LOGPROB_DIFFERENCE = 0.01
"""Largest allowed difference, in nats, between the log-probabilities of an environment and of the sample log."""

Span = tuple[int, int]


class SampledSequence(Struct, kw_only=True):
    """How one sequence was sampled. Arrays have one entry per token, 0 for tokens that the policy did not sample.

    unrecorded: spans that the sample log does not contain. missing: unrecorded spans without log-probabilities from the
    environment. supports: token index -> support. temperature: of all spans. max_difference: largest difference between
    the log-probabilities of the sample log and of the environment. routes: of the tokens up to the last span; None if a
    span has none.
    """

    logprob_T: NDArray[np.float32]
    version_T: NDArray[np.int32]
    unrecorded: list[Span]
    missing: list[Span]
    supports: dict[int, bytes]
    temperature: float
    finish_reason: FinishReason | None = None
    client_label: str = ""
    routes: ExpertRoutes | None = None
    max_difference: float | None = None


def sampled_sequence(
    index: int,
    tokens: Sequence[int],
    checked: CheckedGroup,
    sample_log: SampleLog,
    *,
    version: int,
    temperature: float,
) -> SampledSequence:
    """Look up every trained span of a sequence in the sample log.

    version: policy version of spans that are not recorded. temperature: used if neither the sample log nor the
    environment has one. Raises InvalidGroup if the log-probabilities of sample log and environment differ, or if the
    learner cannot evaluate the sampling distribution.
    """
    spans = trained_spans(checked.trained[index])
    given_T = checked.rollout[index] if checked.rollout else None
    found = [
        sample_log.find(tokens, start, end, logprobs=None if given_T is None else given_T[start:end])
        for start, end in spans
    ]
    unrecorded = [span for span, sampled in zip(spans, found, strict=True) if sampled is None]
    sequence = SampledSequence(
        logprob_T=np.zeros(len(tokens), dtype=np.float32) if given_T is None else given_T.astype(np.float32),
        version_T=np.full(len(tokens), version, dtype=np.int32),
        unrecorded=unrecorded,
        missing=unrecorded if given_T is None else [],
        supports={},
        temperature=_temperature(index, found, checked.temperatures[index], default=temperature),
        finish_reason=found[-1].finish_reason if found and found[-1] else None,
        client_label=next((sampled.client_label for sampled in found if sampled and sampled.client_label), ""),
    )
    for (start, end), sampled in zip(spans, found, strict=True):
        sequence.routes = grown_routes(sequence.routes, sampled.routes if sampled else None)
        if sampled is None:
            continue
        if sampled.unlearnable:
            raise InvalidGroup(f"tokens[{index}][{start}:{end}]: {sampled.unlearnable}")
        if given_T is not None:
            _compare(index, start, given_T[start:end], sampled, sequence)
        sequence.logprob_T[start:end] = sampled.logprobs
        sequence.version_T[start:end] = sampled.versions
        sequence.supports.update(enumerate(sampled.supports, start=start))
    if sequence.supports and len(sequence.supports) != sum(end - start for start, end in spans):
        raise InvalidGroup(
            f"tokens[{index}]: the support of the sampling distribution is recorded for only a part of the spans"
        )
    return sequence


def trained_spans(trained_T: NDArray[np.bool_]) -> list[Span]:
    """Return the maximal spans of trained tokens as (start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], trained_T.astype(np.int8), [0]))))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def token_versions(sequence: SampledSequence, trained_T: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the policy version of every token.

    A token that the policy did not sample takes the version of the sampled token before it, or of the first sampled
    token.
    """
    sampled = np.flatnonzero(trained_T)
    if not sampled.size:
        return sequence.version_T
    source_T = np.maximum.accumulate(np.where(trained_T, np.arange(trained_T.size), sampled[0]))
    return sequence.version_T[source_T]


def _temperature(index: int, found: list[SampledCompletion | None], stated: float | None, *, default: float) -> float:
    """Return the temperature of all spans: recorded spans from the sample log, other spans from the environment."""
    known = {sampled.temperature for sampled in found if sampled is not None}
    if None in found and stated is not None:
        known.add(stated)
    if len(known) > 1:
        listed = ", ".join(f"{value:g}" for value in sorted(known))
        raise InvalidGroup(f"tokens[{index}]: sampled at different temperatures ({listed})")
    return known.pop() if known else default if stated is None else stated


def _compare(
    index: int, start: int, given_T: NDArray[np.float64], sampled: SampledCompletion, sequence: SampledSequence
) -> None:
    difference_T = np.abs(given_T - np.clip(sampled.logprobs.astype(np.float64), MIN_LOGPROB, 0.0))
    if (t := first_index(~(difference_T <= MAX_LOGPROB_DIFFERENCE))) is not None:
        raise InvalidGroup(
            f"inference_logprobs[{index}][{start + t}]: {given_T[t]:.4g} differs from the recorded "
            f"{float(sampled.logprobs[t]):.4g}"
        )
    sequence.max_difference = max(sequence.max_difference or 0.0, float(difference_T.max()))
