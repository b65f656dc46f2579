"""What Tinker's API does: sessions, models in training, sampling sessions and checkpoints of one server.

The methods are named after the routes that they answer. Those that return a promise begin work whose result the client
asks for later. What is wrong with a request is found before, so that the client is told at once. All methods belong to
the event loop.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from msgspec.structs import replace
from prometheus_client.core import Metric

from attachments.tinker import bodies
from attachments.tinker.bodies import AdamFields, Answer, LoraFields
from attachments.tinker.losses import checked_batch, require_adamw
from attachments.tinker.models import TrainedModel, pass_bytes
from attachments.tinker.samplers import Samplers, sample_request, sampled
from attachments.tinker.sections import TinkerApi
from attachments.tinker.sessions import TinkerSession, TinkerSessions
from attachments.tinker.store import Kind, ModelWeights, SavedCheckpoint, SavedRun, TinkerStore, expiry
from attachments.tinker.turns import Turns
from clotho.lanes.compute_thread import finish
from clotho.models.machine import memory_limit
from clotho.sampler import BaseAccess
from clotho.serving.auth import Client
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.metrics import gauge, gauges
from clotho.serving.services import ServerContext
from protocols.errors import did_you_mean, visible

T = TypeVar("T")
MIB = 2**20

CHUNK_SHARE = 0.75
"""Share of `server.max_body_bytes` that the SDK fills with data; it estimates the size of a body."""


class TinkerService:
    """The state of the API of one server. budget: memory that models in training may take, in bytes."""

    def __init__(self, access: BaseAccess, context: ServerContext, settings: TinkerApi) -> None:
        self.access, self.context, self.settings = access, context, settings
        self.store = TinkerStore(Path(settings.directory).expanduser())
        self.queue = Turns()
        self.samplers = Samplers(access, self.store, settings)
        self.sessions = TinkerSessions(
            heartbeat_seconds=settings.heartbeat_seconds,
            max_pending=settings.max_pending,
            on_end=self._on_end,
            explain=self.store.left,
        )
        left = memory_limit().bytes - mx.get_active_memory()
        self.budget = settings.max_bytes or max(0, left) // 2

    @property
    def names(self) -> list[str]:
        """The names of the base model, its own first."""
        found = self.context.models()[0]
        return [found.id, *sorted({*found.aliases, *self.settings.aliases} - {found.id})]

    @property
    def model_bytes(self) -> int:
        """Memory that the models in training hold, as estimated."""
        return sum(model.bytes for one in self.sessions.open("") for model in one.models.values())

    def require_name(self, name: str) -> None:
        """Raise ApiError unless a name is one of the base model."""
        names = self.names
        if name not in names:
            hint = did_you_mean(name, names)
            raise invalid_field(
                "base_model",
                f"this server has no model {visible(name, 120)!r}{hint}; it serves {', '.join(names[:8])}: another "
                "name of the same model is given with --server.tinker.aliases",
            )

    def _require_memory(self, more: int, tokens: int, longest: int, advice: str) -> None:
        """Raise ApiError unless there is room for more bytes, and for a pass of so many tokens beside all models."""
        held, needed = self.model_bytes, more + pass_bytes(self.access.base, tokens, longest)
        if held + needed > self.budget:
            raise ApiError(
                400,
                f"This needs {needed / MIB:.0f} MiB, and models hold {held / MIB:.0f} of {self.budget / MIB:.0f} MiB: "
                f"{advice}, wait, or raise --server.tinker.max-bytes.",
                code="no_memory",
            )

    def _learn(self, session: TinkerSession, cost: float, call: Callable[[], T]) -> Awaitable[T]:
        """Queue a call for the learner's thread."""
        return self.queue.put(session.name, cost, lambda: finish(self.access.compute.learner.submit(call)))

    def _on_end(self, session: TinkerSession) -> None:
        self.samplers.end(session)
        for model in session.models.values():
            self._learn(session, 1.0, model.release)
        session.models.clear()

    def config(self, client: Client) -> Answer:
        """Return what clients do. Chunks of data arrive one after the other, and are small enough for one body."""
        return {
            "fwdbwd_max_chunk_bytes_count": int(CHUNK_SHARE * self.context.settings.max_body_bytes),
            "sample_max_concurrent_requests": self.settings.max_pending,
            **dict.fromkeys(("parallel_fwdbwd_chunks", "proto_compress_fwdbwd"), False),
        }

    def get_server_capabilities(self, client: Client) -> Answer:
        """Return the names of the base model."""
        shared = {"max_context_length": self.context.context_length, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **shared} for name in self.names]}

    def create_session(self, call: bodies.CreateSession, client: Client) -> Answer:
        """Begin a session."""
        return {"type": "create_session", "session_id": self.sessions.create(client, call).session_id}

    def session_heartbeat(self, session_id: str, client: Client) -> Answer:
        """Let a session live on; status 410 ends the client's heartbeats."""
        self.sessions.get(session_id, client)
        return {"type": "session_heartbeat"}

    def finish(self, session_id: str, client: Client) -> Answer:
        """End a session."""
        self.sessions.end(self.sessions.get(session_id, client), "its client has finished it")
        return {}

    def get_info(self, call: bodies.OfModel, client: Client) -> Answer:
        """Return what is known of a model. tokenizer_id: a directory of this machine, or a name on the hub."""
        _, model = self.sessions.of_model(call.model_id, client)
        base, name = self.access.base, self.store.run(call.model_id, "").base_model
        data = {"arch": base.description.architecture, "model_name": name, "tokenizer_id": str(base.files or name)}
        known = {"model_id": call.model_id, "model_data": data, "model_name": name}
        return {"type": "get_info", **known, "lora_rank": model.lora.rank, "is_lora": True}

    def create_model(self, call: bodies.CreateModel, client: Client) -> Answer:
        """Begin to make a model."""
        session = self.sessions.get(call.session_id, client)
        require_adamw(call.optimizer_config.type)
        lora = call.lora_config or LoraFields()
        run = SavedRun(
            model_id=f"{session.session_id}:train:{call.model_seq_id}",
            owner=session.owner,
            base_model=call.base_model,
            lora=replace(lora, seed=secrets.randbits(31)) if lora.seed is None else lora,
            created=time.time(),
            user_metadata=call.user_metadata,
        )
        return self._new_model(session, run, TrainedModel.build, {"type": "create_model", "model_id": run.model_id})

    def _new_model(
        self, session: TinkerSession, run: SavedRun, build: Callable[[TrainedModel], None], answer: Answer
    ) -> Answer:
        """Begin to make a model. answer: the result."""

        async def work(queued: Awaitable[None]) -> Answer:
            try:
                await queued
                self.store.add(run)
            except BaseException:
                session.models.pop(run.model_id, None)
                raise
            return answer

        def begin() -> Any:
            model = self._admitted(session, run)
            return work(self._learn(session, 1.0, partial(build, model)))

        return self.sessions.promise(session, (run.model_id, 0), begin, model_id=run.model_id)

    def _admitted(self, session: TinkerSession, run: SavedRun) -> TrainedModel:
        """Return a model that is not built yet. Raises ApiError if its rank or its memory is above the limit."""
        self.require_name(run.base_model)
        limit, tokens = self.context.settings.adapters.max_rank, self.settings.micro_batch_tokens
        if run.lora.rank > limit:
            raise invalid_field("rank", f"{run.lora.rank} is above {limit}; raise it with --server.adapters.max-rank")
        model = TrainedModel(run.model_id, run.lora, self.access, self.settings)
        self._require_memory(model.bytes, tokens, min(tokens, self.context.context_length), "choose a smaller rank")
        session.models[run.model_id] = model
        return model

    def _work(
        self, call: bodies.OfModel | bodies.LoadWeights, client: Client, compute: Callable[[TrainedModel], T],
        answer: Callable[[T], Answer | Awaitable[Answer]], *, cost: float = 1.0,
    ) -> Answer:  # fmt: skip
        """Queue a call of a model behind its earlier ones. answer: makes the result from what it returns."""
        model_id = call.model_id or ""
        session, model = self.sessions.of_model(model_id, client)

        async def work(queued: Awaitable[T]) -> Answer:
            found = answer(await queued)
            return await found if isawaitable(found) else found

        def begin() -> Any:
            return work(self._learn(session, cost, partial(compute, model)))

        return self.sessions.promise(session, (model_id, call.seq_id), begin, model_id=model_id)

    def forward_backward(self, call: bodies.ForwardBackward, client: Client) -> Answer:
        """Begin to compute a gradient, or log-probabilities only."""
        self.sessions.of_model(call.model_id, client)
        given, context = call.forward_backward_input or call.forward_input, self.context
        if given is None:
            raise invalid_field("forward_backward_input", "is missing")
        batch = checked_batch(given, vocabulary=context.vocab_size, context=context.context_length)
        tokens = max(batch.longest, self.settings.micro_batch_tokens)
        self._require_memory(0, tokens, batch.longest, "send shorter sequences")
        is_gradient = call.forward_backward_input is not None and not call.forward_only
        method = TrainedModel.forward_backward if is_gradient else TrainedModel.forward
        return self._work(call, client, partial(method, batch=batch), lambda found: found, cost=batch.tokens)

    def optim_step(self, call: bodies.OptimStep, client: Client) -> Answer:
        """Begin a step of the optimizer."""
        if not isinstance(call.adam_params, AdamFields):
            require_adamw(getattr(call.optimizer_params, "type", "none"))
            raise invalid_field("adam_params", "is missing")
        adam = call.adam_params

        def step(model: TrainedModel) -> dict[str, float]:
            found = model.optim_step(adam)
            self.store.count(model.model_id, model.steps)
            return found

        return self._work(call, client, step, lambda metrics: {"type": "optim_step", "metrics": metrics})

    def save_weights(self, call: bodies.SaveWeights, client: Client) -> Answer:
        """Begin to save the state of training."""
        _, model = self.sessions.of_model(call.model_id, client)
        name = call.path or f"{model.steps:06d}-{secrets.token_hex(3)}"
        return self._save(call, "weights", name, client, overwrite=call.overwrite)

    def _save(self, call: bodies.Save, kind: Kind, name: str, client: Client, *, overwrite: bool) -> Answer:
        self.sessions.of_model(call.model_id, client)
        if not overwrite:
            self.store.refuse_taken(call.model_id, kind, name)
        kept = SavedCheckpoint(
            run=call.model_id,
            kind=kind,
            name=name,
            step=0,
            created=time.time(),
            expires=expiry(call.ttl_seconds),
            user_metadata=call.user_metadata,
        )
        save = partial(TrainedModel.save, store=self.store, checkpoint=kept)
        answer = {"type": "save_weights" if kind == "weights" else "save_weights_for_sampler", "path": kept.path}
        return self._work(call, client, save, lambda _: answer)

    def load_weights(self, call: bodies.LoadWeights, client: Client) -> Answer:
        """Begin to load a checkpoint, onto a model or as a new one."""
        if call.weights_access_token is not None:
            raise invalid_field("weights_access_token", "is not served: a key loads its own checkpoints")
        require_adamw(call.optimizer_config.type)
        found = self.store.find(call.path, client.owner)
        if found.kind != "weights":
            raise invalid_field("path", "names weights for samplers; training continues from those of save_state")
        load = partial(TrainedModel.load, place=self.store.place(found), optimizer=call.optimizer)
        answer = {"type": "load_weights", "path": call.path}
        if call.model_id is not None:
            return self._work(call, client, load, lambda _: {**answer, "model_id": call.model_id})
        if call.session_id is None or call.model_seq_id is None:
            raise invalid_field("model_id", "is missing; name a model, or session_id and model_seq_id")
        session, source = self.sessions.get(call.session_id, client), self.store.run(found.run, client.owner)
        run = replace(
            source,
            model_id=f"{session.session_id}:train:{call.model_seq_id}",
            owner=session.owner,
            base_model=call.base_model or source.base_model,
            created=time.time(),
            user_metadata=call.user_metadata,
        )

        def build(model: TrainedModel) -> None:
            model.build()
            load(model)

        return self._new_model(session, run, build, {**answer, "model_id": run.model_id})

    def save_weights_for_sampler(self, call: bodies.SaveForSampler, client: Client) -> Answer:
        """Begin to save weights under a name, or to sample from the present ones."""
        if call.path is not None:
            return self._save(call, "sampler_weights", call.path, client, overwrite=False)
        session, _ = self.sessions.of_model(call.model_id, client)
        number = call.sampling_session_seq_id
        if number is None:
            raise invalid_field("path", "is missing; name the weights, or a number of a sampling session")
        in_flight = call.kind == "inflight"
        name = f"inflight:{call.model_id}" if in_flight else f"sample-{number}"

        async def sampler(weights: ModelWeights) -> Answer:
            adapter = self.samplers.adapter(session, name, in_flight=in_flight)
            await self.samplers.publish(adapter, weights)
            found = self.samplers.add(session, number, self.names[0], adapter)
            return {"type": "save_weights_for_sampler", "sampling_session_id": found.sampler_id}

        return self._work(call, client, TrainedModel.weights, sampler)

    def create_sampling_session(self, call: bodies.CreateSamplingSession, client: Client) -> Answer:
        """Add a sampling session of the base model or of a checkpoint."""
        session, path, name = self.sessions.get(call.session_id, client), call.model_path, call.base_model
        if name is not None:
            self.require_name(name)
        if path is not None:
            kept = self.store.find(path, client.owner)
            adapter = self.samplers.adapter(session, path, place=self.store.place(kept), step=kept.step)
            name = name or self.store.run(kept.run, client.owner).base_model
        if name is None:
            raise invalid_field("base_model", "is missing; name the base model or a model_path")
        number = call.sampling_session_seq_id
        found = self.samplers.add(session, number, name, None if path is None else adapter, path or "")
        return {"type": "create_sampling_session", "sampling_session_id": found.sampler_id}

    def sampler(self, sampler_id: str, client: Client) -> Answer:
        """Return what a sampling session samples from."""
        found = self.samplers.get(sampler_id, client)
        return {"sampler_id": found.sampler_id, "base_model": found.base_model, "model_path": found.path or None}

    def asample(self, call: bodies.SampleCall, client: Client) -> Answer:
        """Begin to sample. Raises ApiError for a request that names no sampling session."""
        if call.sampling_session_id is None:
            raise ApiError(400, "sampling_session_id is missing; create a sampling session first.", param="base_model")
        sampler = self.samplers.get(call.sampling_session_id, client)
        request = sample_request(call, sampler, self.context)
        session = self.sessions.get(sampler.session.session_id, client)
        begin = partial(sampled, call, request, sampler, self.samplers, self.context, client)
        answer = self.sessions.promise(session, (sampler.sampler_id, call.seq_id), begin)
        names = [f"{answer['request_id']}:{index}" for index in range(call.num_samples)]
        return {**answer, "sample_sequence_ids": names}

    def unload_model(self, call: bodies.OfModel, client: Client) -> Answer:
        """Begin to free a model; its checkpoints stay."""
        answer = {"type": "unload_model", "model_id": call.model_id}
        promise = self._work(call, client, TrainedModel.release, lambda _: answer)
        session, _ = self.sessions.of_model(call.model_id, client)
        del session.models[call.model_id]
        return promise

    def cancel_future(self, request_id: str, client: Client) -> Answer:
        """Stop a request."""
        self.sessions.cancel(request_id, client)
        return {}


def tinker_metrics(service: TinkerService) -> Iterator[Metric]:
    """Yield gauges of open sessions, which are labels only while they are open."""
    sessions = service.sessions.open("")
    models = {model.model_id: model for one in sessions for model in one.models.values()}
    versions = Counter(visible(one.fields.sdk_version, 20) for one in sessions)
    yield gauges("clotho_tinker_sessions", "Open sessions by version of the SDK.", versions, by="sdk")
    unfinished = {one.session_id: len(one.unfinished) for one in sessions}
    yield gauges("clotho_tinker_requests", "Requests of a session without a result.", unfinished, by="session")
    steps = {name: model.steps for name, model in models.items()}
    yield gauges("clotho_tinker_steps", "Optimizer steps of a model in training.", steps, by="model")
    yield gauge("clotho_tinker_model_bytes", "Estimated memory of the models in training.", service.model_bytes)
    yield gauge("clotho_tinker_budget_bytes", "Memory that models in training may take.", service.budget)
    yield gauge("clotho_tinker_adapters", "Adapters in memory that are sampled from.", service.samplers.resident)
    yield gauge("clotho_tinker_learner_queue", "Requests that wait for the learner.", service.queue.waiting)
