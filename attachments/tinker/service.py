"""What Tinker's API does: sessions, models in training, sampling sessions and checkpoints of one server.

Methods that return a `Promise` begin work whose result the client asks for later. What is wrong with a request is
found before, so that the client is told at once. All methods belong to the event loop.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.core import Metric

from attachments.tinker.bodies import (
    AdamFields,
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    LoraFields,
    ModelCall,
    ModelCreated,
    OptimStep,
    Promise,
    SampleCall,
    Saved,
    SavedForSampler,
    SaveForSampler,
    SaveWeights,
    Stepped,
    Unloaded,
)
from attachments.tinker.learner_queue import LearnerQueue
from attachments.tinker.losses import checked_batch, require_adamw
from attachments.tinker.models import TrainedModel
from attachments.tinker.samplers import Samplers, SamplingSource, sample_request, sampled
from attachments.tinker.sections import TinkerApi
from attachments.tinker.sessions import TinkerSession, TinkerSessions
from attachments.tinker.store import Kind, ModelWeights, SavedCheckpoint, SavedRun, TinkerStore, expiry
from attachments.tinker.wire import ForwardBackward
from clotho.models.machine import memory_limit
from clotho.sampler import BaseAccess
from clotho.serving.auth import Client
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.metrics import gauge, gauges
from clotho.serving.services import ServerContext
from protocols.errors import did_you_mean, visible

T = TypeVar("T")
MIB = 2**20


class TinkerService:
    """The state of the API of one server. budget: memory that models in training may take, in bytes."""

    def __init__(self, access: BaseAccess, context: ServerContext, settings: TinkerApi) -> None:
        self.access, self.context, self.settings = access, context, settings
        self.store = TinkerStore(Path(settings.directory).expanduser())
        self.queue = LearnerQueue(access.compute.learner.submit)
        self.samplers = Samplers(access, self.store, limit=settings.max_samplers)
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

    def _on_end(self, session: TinkerSession) -> None:
        self.samplers.end(session)
        for model in session.models.values():
            self.queue.put(session.name, 1.0, model.release)
        session.models.clear()

    def create_model(self, call: CreateModel, client: Client) -> Promise:
        """Begin to make a model."""
        session = self.sessions.get(call.session_id, client)
        self.require_name(call.base_model)
        require_adamw(call.optimizer_config.type)
        lora = call.lora_config or LoraFields()
        if lora.seed is None:
            lora = replace(lora, seed=secrets.randbits(31))
        run = SavedRun(
            model_id=f"{session.session_id}:train:{call.model_seq_id}",
            owner=session.owner,
            base_model=call.base_model,
            lora=lora,
            created=time.time(),
            user_metadata=call.user_metadata,
        )
        return self._new_model(session, run, lambda _: None, ModelCreated(model_id=run.model_id))

    def _new_model(
        self, session: TinkerSession, run: SavedRun, load: Callable[[TrainedModel], None], answer: Struct
    ) -> Promise:
        """Begin to make a model, and to load it. answer: the result."""

        def begin() -> Promise:
            """Queue the work of a model that is admitted now."""
            model = self._admitted(session, run)
            built = self.queue.put(session.name, 1.0, model.build)
            loaded = self.queue.put(session.name, 1.0, partial(load, model))

            async def work() -> Struct:
                try:
                    await built
                    self.store.add(run)
                except BaseException:
                    session.models.pop(run.model_id, None)
                    loaded.cancel()
                    raise
                await loaded
                return answer

            return self.sessions.begin(session, work(), model_id=run.model_id)

        return self.sessions.once(session, (run.model_id, 0), begin)

    def _admitted(self, session: TinkerSession, run: SavedRun) -> TrainedModel:
        """Return a model that is not built yet. Raises ApiError if its rank or its memory is above the limit."""
        limit = self.context.settings.adapters.max_rank
        if run.lora.rank > limit:
            raise invalid_field("rank", f"{run.lora.rank} is above {limit}; raise it with --server.adapters.max-rank")
        model = TrainedModel(run.model_id, session.session_id, run.lora, self.access, self.settings)
        used = sum(model.bytes for one in self.sessions.open("") for model in one.models.values())
        if used + model.bytes > self.budget:
            raise ApiError(
                400,
                f"The model needs {model.bytes / MIB:.0f} MiB, and {used / MIB:.0f} of {self.budget / MIB:.0f} MiB are "
                "used by others: choose a smaller rank, wait, or raise --server.tinker.max-bytes.",
                code="no_memory",
            )
        session.models[run.model_id] = model
        return model

    def _work(
        self, model_id: str, number: int | None, client: Client, call: Callable[[TrainedModel], T],
        answer: Callable[[T], Struct | Awaitable[Struct]], *, cost: float = 1.0,
    ) -> Promise:  # fmt: skip
        """Queue a call of a model behind its earlier ones. answer: makes the result from what it returns."""
        session, model = self.sessions.of_model(model_id, client)

        def begin() -> Promise:
            queued = self.queue.put(session.name, cost, partial(call, model))

            async def work() -> Struct:
                found = answer(await queued)
                return found if isinstance(found, Struct) else await found

            return self.sessions.begin(session, work(), model_id=model_id)

        return self.sessions.once(session, (model_id, number), begin)

    def forward_backward(self, call: ForwardBackward, number: int | None, client: Client) -> Promise:
        """Begin to compute a gradient, or log-probabilities only."""
        self.sessions.of_model(call.model_id, client)
        context = self.context
        batch = checked_batch(call, vocabulary=context.vocab_size, context=context.context_length)
        method = TrainedModel.forward if call.forward_only else TrainedModel.forward_backward
        compute = partial(method, batch=batch)
        return self._work(call.model_id, number, client, compute, lambda found: found, cost=batch.tokens)

    def optim_step(self, call: OptimStep, client: Client) -> Promise:
        """Begin a step of the optimizer."""
        if not isinstance(call.adam_params, AdamFields):
            require_adamw(getattr(call.optimizer_params, "type", "none"))
            raise invalid_field("adam_params", "is missing")
        adam = call.adam_params

        def step(model: TrainedModel) -> dict[str, float]:
            found = model.optim_step(adam)
            self.store.count(model.model_id, model.steps)
            return found

        return self._work(call.model_id, call.seq_id, client, step, lambda metrics: Stepped(metrics=metrics))

    def save(self, call: SaveWeights, client: Client) -> Promise:
        """Begin to save the state of training."""
        _, model = self.sessions.of_model(call.model_id, client)
        name = call.path or f"{model.steps:06d}-{secrets.token_hex(3)}"
        if not call.overwrite:
            self.store.refuse_taken(call.model_id, "weights", name)
        return self._save(call, "weights", name, client, lambda path: Saved(path=path, type="save_weights"))

    def _save(
        self, call: SaveWeights | SaveForSampler, kind: Kind, name: str, client: Client, answer: Callable[[str], Struct]
    ) -> Promise:
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
        return self._work(call.model_id, call.seq_id, client, save, lambda saved: answer(saved.path))

    def load(self, call: LoadWeights, client: Client) -> Promise:
        """Begin to load a checkpoint, onto a model or as a new one."""
        if call.weights_access_token is not None:
            raise invalid_field("weights_access_token", "is not served: a key loads its own checkpoints")
        if call.optimizer_config is not None:
            require_adamw(call.optimizer_config.type)
        found, place = self.store.find(call.path, client.owner)
        if found.kind != "weights":
            raise invalid_field("path", "names weights for samplers; training continues from those of save_state")
        load = partial(TrainedModel.load, place=place, optimizer=call.optimizer)
        answer = Saved(path=call.path, type="load_weights", model_id=call.model_id)
        if call.model_id is not None:
            return self._work(call.model_id, call.seq_id, client, load, lambda _: answer)
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
        self.require_name(run.base_model)
        return self._new_model(session, run, load, replace(answer, model_id=run.model_id))

    def save_for_sampler(self, call: SaveForSampler, client: Client) -> Promise:
        """Begin to save weights under a name, or to sample from the present ones."""
        session, _ = self.sessions.of_model(call.model_id, client)
        if call.path is not None:
            self.store.refuse_taken(call.model_id, "sampler_weights", call.path)
            return self._save(call, "sampler_weights", call.path, client, lambda path: SavedForSampler(path=path))
        number = call.sampling_session_seq_id
        if number is None:
            raise invalid_field("path", "is missing; name the weights, or a number of a sampling session")
        base_model = self.names[0]

        model_id = call.model_id if call.kind == "inflight" else ""

        async def sampler(weights: ModelWeights) -> Struct:
            found = await self.samplers.publish(session, number, base_model, weights, in_flight=model_id)
            return SavedForSampler(sampling_session_id=found.sampler_id)

        return self._work(call.model_id, call.seq_id, client, TrainedModel.weights, sampler)

    def create_sampler(self, call: CreateSamplingSession, client: Client) -> SamplingSource:
        """Return a new sampling session, of the base model or of a checkpoint."""
        session, number = self.sessions.get(call.session_id, client), call.sampling_session_seq_id
        if call.base_model is not None:
            self.require_name(call.base_model)
        if call.model_path is None:
            if call.base_model is None:
                raise invalid_field("base_model", "is missing; name the base model or a model_path")
            return self.samplers.add(session, number, call.base_model)
        found, place = self.store.find(call.model_path, client.owner)
        name = call.base_model or self.store.run(found.run, client.owner).base_model
        return self.samplers.open(session, number, name, found.path, place, found.step)

    def sample(self, call: SampleCall, client: Client) -> Promise:
        """Begin to sample. Raises ApiError for a request that names no sampling session."""
        if call.sampling_session_id is None:
            raise ApiError(400, "sampling_session_id is missing; create a sampling session first.", param="base_model")
        sampler = self.samplers.get(call.sampling_session_id, client)
        request = sample_request(call, sampler, self.context)
        session = self.sessions.get(sampler.session.session_id, client)

        def begin() -> Promise:
            work = sampled(call, request, sampler, self.samplers, self.context, client)
            return self.sessions.begin(session, work, sequences=call.num_samples)

        return self.sessions.once(session, (sampler.sampler_id, call.seq_id), begin)

    def unload(self, call: ModelCall, client: Client) -> Promise:
        """Begin to free a model; its checkpoints stay."""
        answer = Unloaded(model_id=call.model_id)
        promise = self._work(call.model_id, None, client, TrainedModel.release, lambda _: answer)
        session, _ = self.sessions.of_model(call.model_id, client)
        del session.models[call.model_id]
        return promise


def tinker_metrics(service: TinkerService) -> Iterator[Metric]:
    """Yield gauges of open sessions, which are labels only while they are open."""
    sessions = service.sessions.open("")
    models = {model.model_id: model for one in sessions for model in one.models.values()}
    versions = Counter(visible(one.fields.sdk_version, 20) for one in sessions)
    yield gauges("clotho_tinker_sessions", "Open sessions by version of the SDK.", versions, by="sdk")
    unfinished = {one.session_id: one.unfinished for one in sessions}
    yield gauges("clotho_tinker_requests", "Requests of a session without a result.", unfinished, by="session")
    steps = {name: model.steps for name, model in models.items()}
    yield gauges("clotho_tinker_steps", "Optimizer steps of a model in training.", steps, by="model")
    size = sum(model.bytes for model in models.values())
    yield gauge("clotho_tinker_model_bytes", "Estimated memory of the models in training.", size)
    yield gauge("clotho_tinker_budget_bytes", "Memory that models in training may take.", service.budget)
    yield gauge("clotho_tinker_adapters", "Adapters in memory that are sampled from.", service.samplers.resident)
    yield gauge("clotho_tinker_learner_queue", "Requests that wait for the learner.", service.queue.waiting)
