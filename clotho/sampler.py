"""Sampler: batched decoding in a thread of its own, with weights that change between two tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol, Self

import structlog
from msgspec import Struct

from clotho.inference.engine import DecodeEngine
from clotho.inference.rows import RowAdapter
from clotho.lanes.compute_thread import Compute, ComputeThread, finish
from clotho.lanes.sampling_client import EngineSampler, Flight, Item, Progress, event_or_error
from clotho.library import DEFAULT, compute, result_of, settings
from clotho.models.machine import backend_name, core_division
from clotho.models.parameters import Parameters
from clotho.models.policy import BaseModel, Policy
from clotho.models.turns import TurnBudget
from clotho.scoring.prompt_logprobs import MODEL_DISTRIBUTION, PromptScorer
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.engine import EngineSection, KvPolicy
from clotho.settings.server import AdaptersSection
from protocols.errors import ExecutorStoppedError, as_exception, error_text
from protocols.prompt import group_seed
from protocols.sampling import (
    POLICY,
    Completion,
    CompletionDone,
    PromptLogprobs,
    SampleRequest,
    Sampling,
    can_record_support,
    completion_seeds,
)
from protocols.step import WeightsReady

if TYPE_CHECKING:
    from clotho.learner import Learner


log = structlog.get_logger(__name__)

TURN_SECONDS = 0.25
"""Longest turn of prefill and scoring beside a learner, where both share a device, and on any GPU: macOS ends a process
whose work delays the display.
"""


class OwnThreads(Struct, frozen=True, kw_only=True, eq=False):
    """The compute threads of a program, in which one sampler decodes, and how it decodes there.

    settings: of the engine. adapters: limits of the adapters that requests can name; None: all requests use the policy.
    prefill_seconds, scoring_seconds: limits of a turn of either; 0: a chunk is one turn; None: as 0 on the CPU, and
    `TURN_SECONDS` on a GPU.
    """

    compute: Compute
    settings: EngineSection
    adapters: AdaptersSection | None = None
    prefill_seconds: float | None = None
    scoring_seconds: float | None = None


def _turn_seconds(limit: float | None) -> float | None:
    """Return the limit of a turn; None on the CPU without one. limit: as of `OwnThreads`."""
    return TURN_SECONDS if limit is None and backend_name() != "CPU" else limit


class _Engines:
    """The decode engines of the process, stepped in turn. One whose step raises fails its requests, and goes on."""

    def __init__(self) -> None:
        self.engines: list[DecodeEngine] = []

    @property
    def has_work(self) -> bool:
        """Whether a step of any engine has anything to do."""
        return any(engine.has_work for engine in self.engines)

    @property
    def is_urgent(self) -> bool:
        """Whether a client waits for a first token."""
        return any(engine.is_urgent for engine in self.engines)

    @property
    def long_only(self) -> bool:
        """Whether only long requests of clients are decoded."""
        return all(engine.long_only for engine in self.engines if engine.has_work)

    def tick(self) -> int:
        """Run one step of each engine that has work, and return the number of sampled tokens."""
        sampled = 0
        for engine in list(self.engines):
            try:
                sampled += engine.tick() if engine.has_work else 0
            except Exception as error:
                log.exception("decode_step_failed")
                engine.fail_all(f"a decode step failed: {error_text(error)}")
        return sampled


@cache
def _engines() -> _Engines:
    engines = _Engines()
    compute().decode.attach(engines)
    return engines


class _Call:
    """The completions of one call, collected in the decode thread for `future`, whose cancellation aborts it."""

    def __init__(self, decode: ComputeThread, engine: DecodeEngine, requests: Sequence[SampleRequest]) -> None:
        self._decode = decode
        self.future: Future[list[list[Completion]]] = Future()
        self._found: list[dict[int, Completion]] = [{} for _ in requests]
        self._missing = sum(len(request.seeds) for request in requests)
        self._flight = Flight(engine, requests, self._on_item)
        self._all = range(len(requests))
        self.future.add_done_callback(self._withdraw)
        if not requests:
            self.future.set_result([])
            return
        self._decode.submit(self._flight.start).add_done_callback(self._started)

    def _started(self, started: Future[None]) -> None:
        error = ExecutorStoppedError("the process ends") if started.cancelled() else started.exception()
        if error is not None:
            self._fail(as_exception(error))

    def _on_item(self, item: Item) -> None:
        assert not isinstance(item, BaseException)
        position, event = item[0], event_or_error(item[1])
        if isinstance(event, Exception):
            self._fail(event)
        elif isinstance(event, CompletionDone):
            self._found[position][event.index] = event.completion
            self._missing -= 1
            if not self._missing:
                with suppress(InvalidStateError):  # cancelled meanwhile
                    self.future.set_result([[found[index] for index in sorted(found)] for found in self._found])

    def _fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def _withdraw(self, future: Future[list[list[Completion]]]) -> None:
        if self._missing and (future.cancelled() or future.exception()):
            self._flight.withdrawn = True
            with suppress(ExecutorStoppedError):
                self._decode.submit(partial(self._flight.abort, self._all))


class Sampler:
    """Samples from a policy: all rows of all calls are decoded together, in a thread of its own.

    Any thread and any event loop may call its methods at the same time. A synchronous method blocks its caller until
    the result is there; its `_async` form awaits the same result. Interrupting or cancelling either aborts what it
    asked for. The context manager closes the sampler.

    policy, version: what it samples from; version 0 are the weights of `load`.

    A program with compute threads of its own has one sampler in them, which samples from what the policy itself serves.
    compute, settings: where and how it decodes. engine: decodes. client: for requests of the program's event loop.
    scorer: belongs to the thread of scoring. failure: gets an exception if a step of the engine of a program raises;
    never a result. The engine then decodes no more until `restart`.
    """

    def __init__(
        self,
        policy: Policy | BaseModel,
        *,
        max_num_seqs: int = 256,
        kv_cache_tokens: int = 262_144,
        prefix_cache_tokens: int = 16_384,
        kv_policy: KvPolicy = "keep",
        threads: OwnThreads | None = None,
    ) -> None:
        """Prepare to decode; this takes a moment and no memory for weights.

        The settings are those of `[engine]` in a profile. max_num_seqs: rows that are decoded at once; others wait.
        kv_cache_tokens: tokens of all running rows, prompts included. prefix_cache_tokens: of prompts whose KV caches
        are kept for later requests of clients. kv_policy: what `publish` does to running rows: "keep" continues with
        their KV caches, "recompute" computes these again, "drain" lets the rows finish first. threads: those of a
        program, with all settings; None: those that the samplers of the process share.
        Raises ProfileError for a setting out of range, and ModelError if rows of the model cannot share a batch.
        """
        self.policy, self._is_shared = policy, threads is None
        if threads is None:
            values = {
                "max_num_seqs": max_num_seqs,
                "kv_cache_tokens": kv_cache_tokens,
                "prefix_cache_tokens": prefix_cache_tokens,
                "kv_policy": kv_policy,
            }
            section = settings("engine", EngineSection, values)
            threads = OwnThreads(
                compute=compute(), settings=section, prefill_seconds=TURN_SECONDS, scoring_seconds=TURN_SECONDS
            )
        self.compute, self.settings = threads.compute, threads.settings
        self._decode = self.compute.decode
        self._source = policy.pinned() if self._is_shared and isinstance(policy, Policy) else policy
        self._closed = False
        self.engine = self._decode.submit(partial(self._make_engine, threads)).result()
        self.client = self.new_client()
        self.scorer = PromptScorer(
            policy.copy_model(),
            chunk=self.settings.prefill_chunk,
            rows=self.engine.row_weights,
            turns=TurnBudget(_turn_seconds(threads.scoring_seconds) or 0.0, self.compute.scoring.lane),
        )
        self.failure = self._begin()

    def _make_engine(self, threads: OwnThreads) -> DecodeEngine:
        limit = _turn_seconds(threads.prefill_seconds)
        turns = None if limit is None else TurnBudget(limit, self._decode.lane)
        return DecodeEngine(self._source, self.settings, threads.adapters, turns=turns)

    def _begin(self) -> Future[None]:
        if not self._is_shared:
            return self.compute.attach(self.engine, core_division(self.policy.description.parameters))
        engines = _engines().engines
        self._decode.submit(lambda: engines.append(self.engine)).result()
        return Future()

    def restart(self) -> Future[None]:
        """Let the engine of a program decode again, after its requests have failed. Returns the new `failure`."""
        self.failure = self._decode.attach(self.engine)
        return self.failure

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._source.version

    @property
    def served(self) -> WeightsReady:
        """Version and fingerprint of the weights that sample now."""
        source = self._source
        return WeightsReady(version=source.version, step=source.step, fingerprint=source.fingerprint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is being sampled, and free the KV caches. Further calls of other methods raise RuntimeError."""
        if self._closed:
            return
        self._closed = True

        def leave() -> None:
            self.engine.fail_all("the sampler was closed")
            if self._is_shared:
                _engines().engines.remove(self.engine)

        with suppress(ExecutorStoppedError):
            self._decode.submit(leave).result()

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling = DEFAULT, *, n: int = 1, seed: int = 0
    ) -> list[list[Completion]]:
        """Return `n` completions of each prompt, in the order of the prompts.

        prompts: token ids, as `policy.chat` or `policy.tokenizer.encode` returns them; the prefill of a prompt is
        computed once for its completions. seed: completion i of prompt p is a function of (weights, prompt, sampling,
        seed, p, i): give each step another seed. A completion has `text`, `tokens`, and for each token the
        log-probability in nats under the distribution it was sampled from (`logprobs`) and the version of the weights
        (`versions`); after `max_tokens` its `finish_reason` is "length".
        Raises RequestError, which names the parameter, for a prompt or a setting that cannot be sampled, and
        GenerationError if the model computes numbers that are not finite.
        """
        return result_of(self._sample(prompts, sampling, n, seed))

    async def sample_async(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling = DEFAULT, *, n: int = 1, seed: int = 0
    ) -> list[list[Completion]]:
        """Await what `sample` returns."""
        return await finish(self._sample(prompts, sampling, n, seed))

    def _sample(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, seed: int
    ) -> Future[list[list[Completion]]]:
        self._require_open()
        requests = [
            SampleRequest(
                prompt=tuple(prompt),
                sampling=sampling,
                seeds=completion_seeds(group_seed(seed, position), n),
                background=True,
                record_support=can_record_support(sampling),
                record_routes=True,
            )
            for position, prompt in enumerate(_many(prompts))
        ]
        return _Call(self._decode, self.engine, requests).future

    async def stream(
        self, prompt: Sequence[int], sampling: Sampling = DEFAULT, *, seed: int = 0
    ) -> AsyncGenerator[Progress, None]:
        """Yield each token of one completion when it is sampled (`TokenSampled`), then the whole (`CompletionDone`).

        Streams are admitted before the rows of `sample`. Closing the generator aborts the completion. Arguments and
        errors are those of `sample`.
        """
        self._require_open()
        request = SampleRequest(prompt=tuple(prompt), sampling=sampling, seeds=completion_seeds(seed, 1))
        events = self.new_client().stream(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion | Sequence[int]],
        *,
        temperature: float = 1.0,
    ) -> list[tuple[float, ...]]:
        """Return the log-probabilities in nats of given tokens after their prompts, under the weights that sample now.

        completions: one for each prompt. temperature: of the distribution, above 0; without top-p, top-k and min-p.
        Raises ValueError if the arguments differ in length, and GenerationError as `sample`.
        """
        return result_of(self._score(prompts, completions, temperature))

    async def score_async(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion | Sequence[int]],
        *,
        temperature: float = 1.0,
    ) -> list[tuple[float, ...]]:
        """Await what `score` returns."""
        return await finish(self._score(prompts, completions, temperature))

    def _score(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion | Sequence[int]], temperature: float
    ) -> Future[list[tuple[float, ...]]]:
        self._require_open()
        pairs = [
            (tuple(prompt), one.tokens if isinstance(one, Completion) else tuple(one))
            for prompt, one in zip(_many(prompts), completions, strict=True)
        ]
        if not temperature > 0.0:
            raise ValueError(f"temperature = {temperature:g}: log-probabilities need a temperature above 0")
        distribution = SamplingDistribution(temperature)

        def work() -> list[tuple[float, ...]]:
            found = []
            for prompt, tokens in pairs:
                parameters, version = self._source.served()
                scored = self.scorer.score(parameters, (*prompt, *tokens), version=version, distribution=distribution)
                found.append(scored.logprobs[len(prompt) - 1 :])
            return found

        return self.compute.scoring.submit(work)

    async def prompt_logprobs(
        self,
        tokens: tuple[int, ...],
        *,
        top: int = 0,
        distribution: SamplingDistribution = MODEL_DISTRIBUTION,
        weights: str = POLICY,
    ) -> PromptLogprobs:
        """Return the log-probabilities of the tokens of a prompt, with `top` alternatives for each.

        weights: as in `SampleRequest`. Raises RequestError for unknown ones, and GenerationError as `sample`.
        """

        def chosen() -> tuple[RowAdapter | None, tuple[Parameters, int]]:
            return self.engine.row_weights.admit(weights), self._source.served()

        adapter, (parameters, version) = await finish(self._decode.submit(chosen))
        score = partial(self.scorer.score, parameters, tokens, version=version, top=top)
        return await finish(self.compute.scoring.submit(lambda: score(distribution=distribution, adapter=adapter)))

    def publish(self, learner: Learner) -> int:
        """Sample with the learner's newest weights from the next token on, and return their version.

        Nothing is copied or saved: the sampler refers to the learner's arrays. Completions that are under way continue
        (`kv_policy`), so that one completion can have tokens of several versions. Raises ValueError for a learner of
        another policy.
        """
        version, swap = self._publish(learner)
        result_of(result_of(swap))
        return version

    async def publish_async(self, learner: Learner) -> int:
        """Await what `publish` returns."""
        version, swap = self._publish(learner)
        await finish(await finish(swap))
        return version

    def _publish(self, learner: Learner) -> tuple[int, Future[Future[float]]]:
        self._require_open()
        if learner.policy is not self.policy:
            raise ValueError("this learner trains another policy than the sampler's")
        assert not isinstance(self._source, BaseModel)
        newest = learner.newest
        publish = partial(
            self._source.publish,
            newest.parameters,
            version=newest.version,
            step=newest.version,
            fingerprint=newest.fingerprint,
        )
        return newest.version, self._decode.submit(lambda: self.engine.swap(publish, self.settings.kv_policy))

    def new_client(self) -> EngineSampler:
        """Return an interface for the requests of one event loop, such as that of a server."""
        return EngineSampler(self._decode.submit, self.engine)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sampler is closed: use it inside its with block")


def _many(prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    first: object = prompts[0] if prompts else ()
    if isinstance(first, int | str):
        raise TypeError("prompts are a list of prompts, each a sequence of token ids: sample([policy.chat(text)])")
    return prompts


class ServedWeights(Protocol):
    """Announces the weights that are served. Belongs to the event loop."""

    @property
    def value(self) -> WeightsReady:
        """The weights that are served now."""

    def put(self, value: WeightsReady, /) -> None:
        """Announce others."""


class ReplaceablePolicy(Struct, frozen=True, kw_only=True, eq=False):
    """A policy whose weights somebody outside this process replaces."""

    policy: Policy
    engine: DecodeEngine
    compute: Compute
    weights: ServedWeights
    kv_policy: KvPolicy = "keep"


class BaseAccess(Struct, frozen=True, kw_only=True, eq=False):
    """The base model of a server that trains nothing itself, for attachments that train adapters of it beside it.

    compute: its threads, of which the learner's is free. engine: samples from the base model.
    """

    base: BaseModel
    engine: DecodeEngine
    compute: Compute
