"""What clients sample from: the base model, and adapters that the decode engine gets from memory or from disk.

All requests are rows of one engine, whatever they sample from. The rows of an adapter at one moment (`snapshot`) keep
its weights; those of an adapter in flight continue with the newest weights that were published.
"""

from __future__ import annotations

import secrets
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import anyio
from msgspec import Struct, structs

from attachments.tinker.bodies import SampleCall
from attachments.tinker.sessions import TinkerSession
from attachments.tinker.store import ModelWeights, TinkerStore
from attachments.tinker.wire import SampleResult, text_tokens
from clotho.inference.sampling import validate
from clotho.lanes.compute_thread import finish
from clotho.models.parameters import flat
from clotho.sampler import BaseAccess
from clotho.serving.auth import Client
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.services import ClientSampler, Recording, ServerContext
from clotho.storage.adapters import write_adapter
from protocols.errors import GenerationError, visible
from protocols.sampling import MAX_TOP_LOGPROBS, POLICY, Completion, SampleRequest, Sampling, completion_seeds


class SamplingSource(Struct, frozen=True, kw_only=True):
    """One sampling session. weights: name in the engine. path: of the checkpoint; empty if there is none."""

    sampler_id: str
    session: TinkerSession
    base_model: str
    weights: str = POLICY
    path: str = ""


class _Adapter(Struct, kw_only=True, eq=False):
    """What the engine samples from under one name. place: on disk; None if it is in memory only.

    versions: steps of the optimizer, by version in the engine. weights: None if the engine does not hold them.
    in_flight: newer weights take their place, and they stay in memory.
    """

    name: str
    session_id: str
    step: int
    place: Path | None = None
    versions: dict[int, int] = {}
    weights: ModelWeights | None = None
    in_flight: bool = False


class Samplers:
    """The sampling sessions of a server. All methods belong to the event loop.

    At most `limit` adapters are in memory beside those in flight. The one that came first leaves for the disk, and
    returns when it is sampled from: if the one used least recently left, few samplers would keep the places of all.
    """

    def __init__(self, access: BaseAccess, store: TinkerStore, *, limit: int) -> None:
        self._access, self._store, self._limit = access, store, limit
        self._samplers: dict[str, SamplingSource] = {}
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()
        self._lock = anyio.Lock()

    @property
    def resident(self) -> int:
        """Number of adapters that the engine holds."""
        return sum(one.weights is not None for one in self._adapters.values())

    def get(self, sampler_id: str, client: Client) -> SamplingSource:
        """Return a sampling session. Raises ApiError with status 404."""
        found = self._samplers.get(sampler_id)
        if found is None or client.owner not in ("", found.session.owner):
            shown = visible(sampler_id, 80)
            message = f"There is no sampling session {shown!r}: its session has ended, or the server was started again."
            raise ApiError(404, message, code="not_found")
        return found

    def add(
        self, session: TinkerSession, number: int, base_model: str, weights: str = POLICY, path: str = ""
    ) -> SamplingSource:
        """Add a sampling session."""
        sampler_id = f"{session.session_id}:sample:{number}"
        found = SamplingSource(
            sampler_id=sampler_id, session=session, base_model=base_model, weights=weights, path=path
        )
        self._samplers[sampler_id] = found
        session.samplers.append(sampler_id)
        return found

    def open(
        self, session: TinkerSession, number: int, base_model: str, path: str, place: Path, step: int
    ) -> SamplingSource:
        """Add a sampling session for a checkpoint, which is read when it is sampled from."""
        name = f"tinker:{session.session_id}:{path}"
        if name not in self._adapters:
            self._adapters[name] = _Adapter(name=name, session_id=session.session_id, place=place, step=step)
        return self.add(session, number, base_model, name, path)

    async def publish(
        self, session: TinkerSession, number: int, base_model: str, weights: ModelWeights, *, in_flight: str = ""
    ) -> SamplingSource:
        """Add a sampling session for the weights of a model at one moment, or for these and all that follow.

        in_flight: id of the model whose sampling sessions in flight get these weights too; empty: a moment.
        """
        name = f"tinker:{in_flight}:inflight" if in_flight else f"tinker:{session.session_id}:sample:{number}"
        new = _Adapter(name=name, session_id=session.session_id, step=weights.version, in_flight=bool(in_flight))
        adapter = self._adapters.setdefault(name, new)
        async with self._lock:
            await self._provide(adapter, weights)
        return self.add(session, number, base_model, name)

    async def ready(self, sampler: SamplingSource) -> None:
        """Let the engine hold what is sampled from. Raises CheckpointError if it cannot be read from disk."""
        adapter = self._adapters.get(sampler.weights)
        if adapter is None or adapter.weights is not None:
            return
        async with self._lock:
            if adapter.weights is None:
                place, step = adapter.place, adapter.step
                assert place is not None
                read = self._access.compute.scoring.submit(lambda: TinkerStore.adapter(place, step))
                await self._provide(adapter, await finish(read))

    def steps(self, sampler: SamplingSource, completions: Sequence[Completion]) -> list[tuple[int, ...]]:
        """Return the steps of the optimizer before each token was sampled; 0 for the base model."""
        adapter = self._adapters.get(sampler.weights)
        versions = adapter.versions if adapter is not None else {}
        return [tuple(versions.get(version, 0) for version in one.versions) for one in completions]

    def end(self, session: TinkerSession) -> None:
        """Forget what belongs to a session."""
        for sampler_id in session.samplers:
            self._samplers.pop(sampler_id, None)
        for name, adapter in list(self._adapters.items()):
            if adapter.session_id == session.session_id:
                self._withdraw(adapter)
                del self._adapters[name]
        shutil.rmtree(self._store.scratch(session.session_id), ignore_errors=True)

    async def _provide(self, adapter: _Adapter, weights: ModelWeights) -> None:
        engine, scales = self._access.engine, weights.scales

        def provide() -> int:
            arrays = flat(weights.parameters)
            return engine.provide_adapter(adapter.name, arrays, scales, weights.fingerprint).version

        version = await finish(self._access.compute.decode.submit(provide))
        adapter.versions = {**(adapter.versions if adapter.in_flight else {}), version: weights.version}
        adapter.weights = weights
        self._adapters.move_to_end(adapter.name)
        here = [one for one in self._adapters.values() if one.weights is not None and not one.in_flight]
        for one in here[: max(0, len(here) - self._limit)]:
            await self._leave(one)

    async def _leave(self, adapter: _Adapter) -> None:
        weights = adapter.weights
        assert weights is not None
        if adapter.place is None:
            place = self._store.scratch(adapter.session_id) / adapter.name.rpartition(":")[2]
            await anyio.to_thread.run_sync(lambda: write_adapter(place, weights.parameters, weights.config))
            adapter.place = place
        self._withdraw(adapter)

    def _withdraw(self, adapter: _Adapter) -> None:
        engine, name = self._access.engine, adapter.name
        if adapter.weights is not None:
            self._access.compute.decode.submit(lambda: engine.withdraw_adapter(name))
        adapter.weights = None


SEED_BITS = 63


def sample_request(call: SampleCall, sampler: SamplingSource, context: ServerContext) -> SampleRequest:
    """Check a request. Raises ApiError that names what is wrong or not served."""
    _refuse_unserved(call)
    prompt = text_tokens(call.prompt.chunks)
    if not prompt:
        raise invalid_field("prompt", "has no tokens")
    if len(prompt) >= context.context_length:
        raise invalid_field("prompt", f"has {len(prompt)} tokens; the context length is {context.context_length}")
    if call.num_samples > context.settings.max_choices:
        limit = context.settings.max_choices
        raise invalid_field("num_samples", f"must be at most {limit}; raise it with --server.max-choices")
    if call.prompt_logprobs_last_n is not None and not 1 <= call.prompt_logprobs_last_n < len(prompt):
        raise invalid_field("prompt_logprobs_last_n", "must be at least 1, and less than the length of the prompt")
    fields = call.sampling_params
    seed = secrets.randbits(SEED_BITS) if fields.seed is None else fields.seed % 2**SEED_BITS
    request = SampleRequest(
        prompt=prompt,
        sampling=_sampling(call, context.sampling.max_tokens, context.context_length - len(prompt)),
        seeds=completion_seeds(seed, call.num_samples),
        reuse_prefix=True,
        weights=sampler.weights,
    )
    validate(
        request, vocabulary=context.vocab_size, context=context.context_length, cache_tokens=context.context_length
    )
    return request


def _refuse_unserved(call: SampleCall) -> None:
    if call.record_stability_info:
        raise invalid_field("record_stability_info", "is not served; train with loss_fn = importance_sampling")
    if call.target_prompt_logprobs is not None:
        raise invalid_field("target_prompt_logprobs", "is not served; ask for topk_prompt_logprobs, or one prompt each")
    if call.prompt_alt_tokens_k:
        raise invalid_field("prompt_alt_tokens_k", "is not served; sample with max_tokens = 1 from each prefix")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(call, name) > MAX_TOP_LOGPROBS:
            raise invalid_field(name, f"must be at most {MAX_TOP_LOGPROBS}")


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
) -> SampleResult:
    """Sample, and score the prompt if requested. Raises RequestError, GenerationError, ApiError and CheckpointError."""
    await samplers.ready(sampler)
    named = structs.replace(client, name=sampler.session.name)
    rows = ClientSampler(context, named, Recording(remember=lambda _, __: None))
    (completions,) = await rows.complete_all([request])
    if any(one.finish_reason == "abort" for one in completions):
        raise GenerationError("the request was aborted")
    scores = None
    if call.prompt_logprobs or call.topk_prompt_logprobs:
        scores = await context.prompt_logprobs(request.prompt, call.topk_prompt_logprobs, sampler.weights)
    return SampleResult.of(
        completions,
        samplers.steps(sampler, completions),
        scores,
        last=call.prompt_logprobs_last_n,
        top=call.topk_prompt_logprobs,
        logprobs=bool(call.prompt_logprobs),
    )
