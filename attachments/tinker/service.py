"""What Tinker's API does: sessions, models in training, sampling sessions and checkpoints of one server.

Methods that return a `Promise` begin work whose result the client asks for later. What is wrong with a request is
found before, so that the client is told at once. All methods belong to the event loop.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from msgspec.structs import replace

from attachments.tinker.bodies import (
    AdamFields,
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    LoraFields,
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
from attachments.tinker.models import TrainedModel, lora_method, training_bytes
from attachments.tinker.samplers import Samplers, SamplingSource
from attachments.tinker.sampling import named_by, sample_request, sampled
from attachments.tinker.sections import TinkerApi
from attachments.tinker.sessions import TinkerSession, TinkerSessions
from attachments.tinker.store import Kind, ModelWeights, SavedCheckpoint, SavedRun, TinkerStore, expiry
from attachments.tinker.wire import ForwardBackward, JsonResult, Result
from clotho.models.machine import memory_limit
from clotho.sampler import BaseAccess
from clotho.serving.auth import Client
from clotho.serving.errors import ApiError, invalid_field
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

        async def created(built: Callable[[], Coroutine[Any, Any, TrainedModel]]) -> Result:
            await built()
            return JsonResult(body=ModelCreated(model_id=run.model_id))

        def begin() -> Promise:
            return self.sessions.begin(session, created(self._new_model(session, run)), model_id=run.model_id)

        return self.sessions.once(session, (run.model_id, 0), begin)

    def _new_model(self, session: TinkerSession, run: SavedRun) -> Callable[[], Coroutine[Any, Any, TrainedModel]]:
        """Admit a model, and return what makes it. Raises ApiError."""
        limit = self.context.settings.adapters.max_rank
        if run.lora.rank > limit:
            raise invalid_field("rank", f"{run.lora.rank} is above {limit}; raise it with --server.adapters.max-rank")
        method = lora_method(self.access.base, run.lora)
        size = training_bytes(self.access.base, method)
        used = sum(model.bytes for one in self.sessions.open("") for model in one.models.values())
        if used + size > self.budget:
            raise ApiError(
                400,
                f"The model needs {size / MIB:.0f} MiB, and {used / MIB:.0f} of {self.budget / MIB:.0f} MiB are used "
                "by others: choose a smaller rank, wait, or raise --server.tinker.max-bytes.",
                code="no_memory",
            )
        model = TrainedModel(run.model_id, session.session_id, run.lora, size)
        session.models[run.model_id] = model
        queued = self.queue.put(session.name, 1.0, partial(model.build, self.access, method, self.settings))

        async def built() -> TrainedModel:
            try:
                await queued
                self.store.add(run)
            except BaseException:
                session.models.pop(run.model_id, None)
                raise
            return model

        return built

    def _work(
        self, model_id: str, number: int | None, client: Client, cost: float,
        call: Callable[[TrainedModel], T], answer: Callable[[T], Coroutine[Any, Any, Result]],
    ) -> Promise:  # fmt: skip
        """Queue a call of a model behind its earlier ones."""
        session, model = self.sessions.of_model(model_id, client)

        def begin() -> Promise:
            queued = self.queue.put(session.name, cost, partial(call, model))

            async def work() -> Result:
                return await answer(await queued)

            return self.sessions.begin(session, work(), model_id=model_id)

        return self.sessions.once(session, (model_id, number), begin)

    def forward_backward(self, call: ForwardBackward, number: int | None, client: Client) -> Promise:
        """Begin to compute a gradient, or log-probabilities only."""
        self.sessions.of_model(call.model_id, client)
        context = self.context
        batch = checked_batch(call, vocabulary=context.vocab_size, context=context.context_length)

        async def answer(found: Result) -> Result:
            return found

        method = TrainedModel.forward if call.forward_only else TrainedModel.forward_backward
        return self._work(call.model_id, number, client, batch.tokens, lambda model: method(model, batch), answer)

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

        async def answer(metrics: dict[str, float]) -> Result:
            return JsonResult(body=Stepped(metrics=metrics))

        return self._work(call.model_id, call.seq_id, client, 1.0, step, answer)

    def save(self, call: SaveWeights, client: Client) -> Promise:
        """Begin to save the state of training."""
        _, model = self.sessions.of_model(call.model_id, client)
        name = call.path or f"{model.steps:06d}-{secrets.token_hex(3)}"
        if not call.overwrite:
            self.store.refuse_taken(call.model_id, "weights", name)
        kept = self._checkpoint(call.model_id, "weights", name, call.ttl_seconds, call.user_metadata)

        async def answer(saved: SavedCheckpoint) -> Result:
            return JsonResult(body=Saved(path=saved.path, type="save_weights"))

        return self._work(call.model_id, call.seq_id, client, 1.0, lambda one: one.save(self.store, kept), answer)

    @staticmethod
    def _checkpoint(
        model_id: str, kind: Kind, name: str, ttl: int | None, metadata: dict[str, Any] | None
    ) -> SavedCheckpoint:
        return SavedCheckpoint(
            run=model_id, kind=kind, name=name, step=0, created=time.time(), expires=expiry(ttl), user_metadata=metadata
        )

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

        async def answer(_: None, model_id: str) -> Result:
            return JsonResult(body=Saved(path=call.path, type="load_weights", model_id=model_id))

        if call.model_id is not None:
            model_id = call.model_id
            return self._work(model_id, call.seq_id, client, 1.0, load, partial(answer, model_id=model_id))
        if call.session_id is None or call.model_seq_id is None:
            raise invalid_field("model_id", "is missing; name a model, or session_id and model_seq_id")
        return self._load_new(call.session_id, call.model_seq_id, call, client, found, load)

    def _load_new(
        self, session_id: str, number: int, call: LoadWeights, client: Client, found: SavedCheckpoint,
        load: Callable[[TrainedModel], None],
    ) -> Promise:  # fmt: skip
        session, source = self.sessions.get(session_id, client), self.store.run(found.run, client.owner)
        name = call.base_model or source.base_model
        self.require_name(name)
        model_id = f"{session.session_id}:train:{number}"
        run = SavedRun(
            model_id=model_id,
            owner=session.owner,
            base_model=name,
            lora=source.lora,
            created=time.time(),
            user_metadata=call.user_metadata,
        )

        async def work(built: Callable[[], Coroutine[Any, Any, TrainedModel]], loaded: Any) -> Result:
            try:
                await built()
            except BaseException:
                loaded.cancel()
                raise
            await loaded
            return JsonResult(body=Saved(path=call.path, type="load_weights", model_id=model_id))

        def begin() -> Promise:
            built = self._new_model(session, run)
            loaded = self.queue.put(session.name, 1.0, partial(load, session.models[model_id]))
            return self.sessions.begin(session, work(built, loaded), model_id=model_id)

        return self.sessions.once(session, (model_id, 0), begin)

    def save_for_sampler(self, call: SaveForSampler, client: Client) -> Promise:
        """Begin to save weights under a name, or to sample from the present ones."""
        session, _ = self.sessions.of_model(call.model_id, client)
        if call.path is not None:
            self.store.refuse_taken(call.model_id, "sampler_weights", call.path)
            kept = self._checkpoint(call.model_id, "sampler_weights", call.path, call.ttl_seconds, call.user_metadata)

            async def saved(checkpoint: SavedCheckpoint) -> Result:
                return JsonResult(body=SavedForSampler(type="save_weights_for_sampler", path=checkpoint.path))

            return self._work(call.model_id, call.seq_id, client, 1.0, lambda one: one.save(self.store, kept), saved)
        number = call.sampling_session_seq_id
        if number is None:
            raise invalid_field("path", "is missing; name the weights, or a number of a sampling session")
        base_model = self.names[0]

        async def sampler(weights: ModelWeights) -> Result:
            if call.kind == "inflight":
                found = await self.samplers.follow(session, number, base_model, call.model_id, weights)
            else:
                found = await self.samplers.snapshot(session, number, base_model, weights)
            return JsonResult(
                body=SavedForSampler(type="save_weights_for_sampler", sampling_session_id=found.sampler_id)
            )

        return self._work(call.model_id, call.seq_id, client, 1.0, TrainedModel.weights, sampler)

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
        """Begin to sample."""
        sampler = self.samplers.get(named_by(call), client)
        request = sample_request(call, sampler, self.context)
        session = self.sessions.get(sampler.session.session_id, client)

        def begin() -> Promise:
            work = sampled(call, request, sampler, self.samplers, self.context, client)
            return self.sessions.begin(session, work, sequences=call.num_samples)

        return self.sessions.once(session, (sampler.sampler_id, call.seq_id), begin)

    def unload(self, model_id: str, client: Client) -> Promise:
        """Begin to free a model; its checkpoints stay."""

        async def answer(_: None) -> Result:
            return JsonResult(body=Unloaded(model_id=model_id))

        promise = self._work(model_id, None, client, 1.0, TrainedModel.release, answer)
        session, _ = self.sessions.of_model(model_id, client)
        del session.models[model_id]
        return promise
