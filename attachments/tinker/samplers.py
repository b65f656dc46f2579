"""What clients sample from: the base model, and adapters that the decode engine gets from memory or from disk.

All requests are rows of one engine, whatever they sample from. The rows of an adapter at one moment (`snapshot`) keep
its weights; those of an adapter in flight continue with the newest weights that were published.
"""

from __future__ import annotations

import secrets
import shutil
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from msgspec import Struct, structs

from attachments.tinker.bodies import Answer, SampleCall
from attachments.tinker.sections import TinkerApi
from attachments.tinker.sessions import TinkerSession
from attachments.tinker.store import ModelWeights, TinkerStore, adapter_weights
from attachments.tinker.turns import Turns
from attachments.tinker.wire import text_tokens
from clotho.inference.sampling import validate
from clotho.lanes.compute_thread import finish
from clotho.models.parameters import flat
from clotho.sampler import BaseAccess
from clotho.serving.auth import Client
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.services import ClientSampler, Recording, ServerContext
from clotho.storage.adapters import write_adapter
from protocols.errors import GenerationError, visible
from protocols.sampling import POLICY, SampleRequest, Sampling, completion_seeds

KEPT_VERSIONS = 1024
"""Versions of an adapter in flight whose steps are known, more than a completion under way has."""


class ServedAdapter(Struct, kw_only=True, eq=False):
    """What the engine samples from under one name. place: on disk; None if it is in memory only.

    versions: steps of the optimizer, by version in the engine. weights: None if the engine does not hold them.
    in_flight: newer weights take their place, and they stay in memory. used: sampled from, since its place was asked
    for last.
    """

    name: str
    session_id: str
    place: Path | None = None
    step: int = 0
    versions: dict[int, int] = {}
    weights: ModelWeights | None = None
    in_flight: bool = False
    used: bool = False


class SamplingSource(Struct, frozen=True, kw_only=True):
    """One sampling session. adapter: None: the base model. path: of the checkpoint; empty if there is none."""

    sampler_id: str
    session: TinkerSession
    base_model: str
    adapter: ServedAdapter | None = None
    path: str = ""

    @property
    def weights(self) -> str:
        """Its name in the engine."""
        return POLICY if self.adapter is None else self.adapter.name

    def steps(self, versions: tuple[int, ...]) -> list[int]:
        """Return the steps of the optimizer before tokens of these versions were sampled; 0 for the base model."""
        known = self.adapter.versions if self.adapter is not None else {}
        return [known.get(version, 0) for version in versions]


class Samplers:
    """The sampling sessions of a server. All methods belong to the event loop.

    At most `max_samplers` adapters are in memory beside those in flight. Of the others, the one that came first leaves
    for the disk, after those that nobody samples from, and returns when it is sampled from (the clock algorithm). If
    the one used least recently left, few samplers would keep the places of all. Sessions take turns to load their
    adapters. Each has the `max_sampling_sessions` that were used last, with their adapters in memory and on disk.
    """

    def __init__(self, access: BaseAccess, store: TinkerStore, settings: TinkerApi) -> None:
        self._access, self._store, self._settings = access, store, settings
        self._samplers: dict[str, SamplingSource] = {}
        self._adapters: OrderedDict[str, ServedAdapter] = OrderedDict()
        self._turns = Turns()

    @property
    def resident(self) -> int:
        """Number of adapters that the engine holds."""
        return sum(one.weights is not None for one in self._adapters.values())

    def get(self, sampler_id: str, client: Client) -> SamplingSource:
        """Return a sampling session, which counts as a use. Raises ApiError with status 404."""
        found = self._samplers.get(sampler_id)
        if found is None or client.owner not in ("", found.session.owner):
            raise self._gone(sampler_id)
        found.session.samplers.remove(sampler_id)
        found.session.samplers.append(sampler_id)
        return found

    def _gone(self, name: str) -> ApiError:
        used = f"used {self._settings.max_sampling_sessions} others since (server.tinker.max_sampling_sessions)"
        reason = f"its session has ended or {used}, or the server was started again"
        return ApiError(404, f"There is no sampling session {visible(name, 80)!r}: {reason}.", code="not_found")

    def _require(self, adapter: ServedAdapter) -> None:
        """Raise ApiError with status 404 if an adapter was forgotten meanwhile."""
        if self._adapters.get(adapter.name) is not adapter:
            raise self._gone(adapter.name)

    def adapter(self, session: TinkerSession, name: str, **fields: object) -> ServedAdapter:
        """Return the adapter of a name, which ends with the session."""
        name = f"tinker:{session.session_id}:{name}"
        if name not in self._adapters:
            self._adapters[name] = structs.replace(ServedAdapter(name=name, session_id=session.session_id), **fields)
        return self._adapters[name]

    def add(
        self, session: TinkerSession, number: int, base_model: str, adapter: ServedAdapter | None = None, path: str = ""
    ) -> SamplingSource:
        """Add a sampling session, in place of the one that was used least recently if they are too many.

        An adapter from disk is read when it is sampled from.
        """
        found = SamplingSource(
            sampler_id=f"{session.session_id}:sample:{number}",
            session=session,
            base_model=base_model,
            adapter=adapter,
            path=path,
        )
        if self._samplers.get(found.sampler_id) is None:
            session.samplers.append(found.sampler_id)
        self._samplers[found.sampler_id] = found
        for sampler_id in session.samplers[: -self._settings.max_sampling_sessions]:
            session.samplers.remove(sampler_id)
            self._forget(self._samplers.pop(sampler_id).adapter)
        return found

    def _forget(self, adapter: ServedAdapter | None) -> None:
        """Forget an adapter that no sampling session has."""
        if adapter is None or any(one.adapter is adapter for one in self._samplers.values()):
            return
        self._withdraw(adapter)
        self._adapters.pop(adapter.name, None)
        if adapter.place is not None and adapter.place.parent == self._store.scratch(adapter.session_id):
            shutil.rmtree(adapter.place, ignore_errors=True)

    async def publish(self, adapter: ServedAdapter, weights: ModelWeights) -> None:
        """Let the engine sample from weights, in place of earlier ones of the adapter."""
        await self._turns.put(adapter.session_id, 1.0, partial(self._provide, adapter, weights))

    async def ready(self, adapter: ServedAdapter) -> None:
        """Let the engine hold an adapter. Raises CheckpointError if it cannot be read from disk, and ApiError."""
        adapter.used = True
        while adapter.weights is None:
            await self._turns.put(adapter.session_id, 1.0, partial(self._load, adapter))

    async def _load(self, adapter: ServedAdapter) -> None:
        if adapter.weights is None:
            assert adapter.place is not None
            read = partial(adapter_weights, adapter.place, adapter.step)
            await self._provide(adapter, await finish(self._access.compute.scoring.submit(read)))

    def end(self, session: TinkerSession) -> None:
        """Forget what belongs to a session."""
        for sampler_id in session.samplers:
            del self._samplers[sampler_id]
        for name, adapter in list(self._adapters.items()):
            if adapter.session_id == session.session_id:
                self._withdraw(adapter)
                del self._adapters[name]
        shutil.rmtree(self._store.scratch(session.session_id), ignore_errors=True)

    async def _provide(self, adapter: ServedAdapter, weights: ModelWeights) -> None:
        engine, scales, limit = self._access.engine, weights.scales, self._settings.max_samplers

        def provide() -> None:
            arrays = flat(weights.parameters)
            version = engine.provide_adapter(adapter.name, arrays, scales, weights.fingerprint).version
            # Here, because completions with tokens of this version can end before the event loop continues.
            known = list(adapter.versions.items())[1 - KEPT_VERSIONS :] if adapter.in_flight else ()
            adapter.versions = {**dict(known), version: weights.version}

        self._require(adapter)
        await finish(self._access.compute.decode.submit(provide))
        self._require(adapter)
        adapter.weights = weights
        self._adapters.move_to_end(adapter.name)
        here = [one for one in self._adapters.values() if one.weights is not None and not one.in_flight]
        if len(here) > limit:
            await self._leave(self._unused([one for one in here if one is not adapter]))

    def _unused(self, found: list[ServedAdapter]) -> ServedAdapter:
        """Return the first adapter that was not used since its place was asked for last; the used ones queue up."""
        for one in found:
            if not one.used:
                return one
            one.used = False
            self._adapters.move_to_end(one.name)
        return found[0]

    async def _leave(self, adapter: ServedAdapter) -> None:
        weights = adapter.weights
        assert weights is not None
        if adapter.place is None:
            place = self._store.scratch(adapter.session_id) / adapter.name.rpartition(":")[2]
            await anyio.to_thread.run_sync(lambda: write_adapter(place, weights.parameters, weights.config))
            adapter.place, adapter.step = place, weights.version
        self._withdraw(adapter)

    def _withdraw(self, adapter: ServedAdapter) -> None:
        engine, name = self._access.engine, adapter.name
        self._access.compute.decode.submit(lambda: engine.withdraw_adapter(name))
        adapter.weights = None


SEED_BITS = 63

UNSERVED = {
    "record_stability_info": "train with loss_fn = importance_sampling",
    "target_prompt_logprobs": "ask for topk_prompt_logprobs, or one prompt each",
    "prompt_alt_tokens_k": "sample with max_tokens = 1 from each prefix",
}
"""Fields that are refused, with the way out."""


def sample_request(call: SampleCall, sampler: SamplingSource, context: ServerContext) -> SampleRequest:
    """Check a request. Raises ApiError and RequestError that name what is wrong or not served."""
    for name, advice in UNSERVED.items():
        if getattr(call, name) not in (None, False, 0):
            raise invalid_field(name, f"is not served; {advice}")
    prompt, length, limit = text_tokens(call.prompt.chunks), context.context_length, context.settings.max_choices
    if call.num_samples > limit:
        raise invalid_field("num_samples", f"must be at most {limit}; raise it with --server.max-choices")
    if call.prompt_logprobs_last_n is not None and not 1 <= call.prompt_logprobs_last_n < len(prompt):
        raise invalid_field("prompt_logprobs_last_n", "must be at least 1, and less than the length of the prompt")
    seed = call.sampling_params.seed
    seed = secrets.randbits(SEED_BITS) if seed is None else seed % 2**SEED_BITS
    request = SampleRequest(
        prompt=prompt,
        sampling=_sampling(call, context.sampling.max_tokens, length - len(prompt)),
        seeds=completion_seeds(seed, call.num_samples),
        reuse_prefix=True,
        weights=sampler.weights,
    )
    validate(request, vocabulary=context.vocab_size, context=length, cache_tokens=length)
    return request


def _sampling(call: SampleCall, usual: int, room: int) -> Sampling:
    """Return the settings of the engine, which checks their ranges.

    usual: `max_tokens` if the client says nothing. room: tokens until the end of the context.

    `stop`: strings or tokens end a completion as the model's end tokens do; an empty list disables these.
    """
    fields, stop = call.sampling_params, call.sampling_params.stop
    words = [stop] if isinstance(stop, str) else stop or []
    return Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(0, fields.top_k),
        max_tokens=min(room, usual if fields.max_tokens is None else fields.max_tokens),
        stop=tuple(word for word in words if isinstance(word, str)),
        stop_token_ids=tuple(word for word in words if isinstance(word, int)),
        ignore_eos=isinstance(stop, list) and not stop,
        top_logprobs=call.topk_sample_logprobs,
    )


async def sampled(
    call: SampleCall,
    request: SampleRequest,
    sampler: SamplingSource,
    samplers: Samplers,
    context: ServerContext,
    client: Client,
) -> Answer:
    """Sample, and score the prompt if requested. Raises RequestError, GenerationError, ApiError and CheckpointError.

    The first token of a prompt has no score; `prompt_logprobs_last_n` leaves out others.
    """
    if sampler.adapter is not None:
        await samplers.ready(sampler.adapter)
    named = structs.replace(client, name=sampler.session.name)
    rows = ClientSampler(context, named, Recording(remember=lambda _, __: None))
    (completions,) = await rows.complete_all([request])
    if any(one.finish_reason == "abort" for one in completions):
        raise GenerationError("the request was aborted")
    sequences = [
        {
            "stop_reason": one.finish_reason,
            "tokens": one.tokens,
            "logprobs": one.logprobs,
            "topk_logprobs": one.top_logprobs or None,
            "versions": sampler.steps(one.versions),
        }
        for one in completions
    ]
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": None,
        "topk_prompt_logprobs": None,
    }
    if not call.prompt_logprobs and not call.topk_prompt_logprobs:
        return answer
    scores = await context.prompt_logprobs(request.prompt, call.topk_prompt_logprobs, sampler.weights)
    last = call.prompt_logprobs_last_n
    hidden = 1 if last is None else len(request.prompt) - last
    if call.prompt_logprobs:
        answer["prompt_logprobs"] = [None] * hidden + list(scores.logprobs[hidden - 1 :])
    if call.topk_prompt_logprobs:
        answer["topk_prompt_logprobs"] = [()] * hidden + list(scores.top_logprobs[hidden - 1 :])
    return answer
