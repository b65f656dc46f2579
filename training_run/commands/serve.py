"""The command `serve`: a model behind the HTTP API, without a learner and without a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import anyio
import structlog
from anyio.abc import TaskStatus
from anyio.to_thread import run_sync
from msgspec import Struct, structs
from rich.console import Console

from clotho.backend import backend
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.loading import find_model
from clotho.models.machine import compute_slots
from clotho.models.policy import BaseModel, Policy, load_policy
from clotho.process import load_blas
from clotho.sampler import BaseAccess, OwnThreads, ReplaceablePolicy, Sampler
from clotho.serving.server import ApiServer, base_url, listen
from clotho.serving.services import ServedModel, ServerContext
from protocols.step import WeightsReady
from training_run.machine import describe_machine
from training_run.memory.estimate import serving_memory
from training_run.memory.report import limit_memory
from training_run.profile.command_profiles import REPLACES_WEIGHTS, ServeArguments
from training_run.records.display import machine_lines
from training_run.records.event_log import event_log
from training_run.records.terminal_text import memory, print_line, relative_path, size
from training_run.serving import SERVER_RESTARTS, ServingState, names_of, report_failure
from training_run.start.loading_server import while_loading
from training_run.start.startup import startup_watch
from training_run.supervision.idle_sleep import no_idle_sleep
from training_run.supervision.latest import Latest
from training_run.supervision.process_signals import finish_computation
from training_run.supervision.signals import handle_signals
from training_run.supervision.supervisor import Supervisor, permanent, transient

log = structlog.get_logger(actor="serve")


class Serving(Struct, frozen=True, kw_only=True, eq=False):
    """A loaded model with its sampler.

    sampler: of a base model, or of the policy of a training run if the server accepts weights.
    model: the base as requests name it. weights: the served weights.
    """

    arguments: ServeArguments
    sampler: Sampler
    model: ServedModel
    weights: Latest[WeightsReady]

    def server_context(self, state: ServingState) -> ServerContext:
        """The HTTP server's interface to the engine.

        Attachments may train adapters of a base model; other training runs may replace the weights of a policy.
        """
        profile, sampler = self.arguments.profile, self.sampler
        served, engine, compute = sampler.policy, sampler.engine, sampler.compute
        return ServerContext(
            models=lambda: (self.model,),
            engine=structs.replace(state.engine_access(), may_pause=True),
            base_model=self.model.id,
            sampler=sampler.client,
            tokenizer=served.tokenizer,
            settings=structs.replace(profile.server, model_name=self.model.id),
            sampling=profile.sampling,
            prompt_logprobs=state.score,
            weights=self.model.weights,
            health=state.health,
            context_length=served.context_length,
            vocab_size=served.vocab_size,
            measure=partial(state.metrics, self.model.id),
            replaceable=ReplaceablePolicy(policy=served, engine=engine, compute=compute, weights=self.weights)
            if isinstance(served, Policy)
            else None,
            base=BaseAccess(base=served, engine=engine, compute=compute) if isinstance(served, BaseModel) else None,
        )


class UntilDrained:
    """The actor whose end ends the server: it shows the start-up screen and waits for `drain`."""

    name = "serving"

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready, self._drained = on_ready, anyio.Event()

    def drain(self) -> None:
        """End."""
        self._drained.set()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Call `on_ready`, and wait for `drain`."""
        self._on_ready()
        task_status.started()
        await self._drained.wait()


async def serve(arguments: ServeArguments, console: Console) -> int:
    """Serve until a signal arrives, and return the exit status: 0, or 128 plus the number of the second signal.

    The first signal drains: no request is admitted any more, and running requests have `server.shutdown_seconds` to
    finish. Raises ClothoError if the model cannot be served or an actor fails.
    """
    profile = arguments.profile
    settings = profile.server
    with ExitStack() as stack:
        stack.enter_context(event_log(console))
        stack.enter_context(no_idle_sleep(enabled=profile.monitor.prevent_sleep))
        listener = stack.enter_context(listen(settings))
        compute = Compute(decode_share=profile.engine.decode_share, slots=compute_slots())
        compute.start()
        stack.callback(compute.stop)
        watch = startup_watch(profile.monitor.watchdog_seconds)
        with watch.phase("model and tokenizer"):
            sampler = await while_loading(listener, settings, load(arguments, compute))
        weights = Latest[WeightsReady]("weights")
        weights.put(sampler.served)
        supervisor = Supervisor(on_failure=report_failure, grace_seconds=settings.shutdown_seconds + 5.0)
        state = ServingState(sampler, children=supervisor.status)
        model = served_base(arguments, sampler.policy, weights)
        serving = Serving(arguments=arguments, sampler=sampler, model=model, weights=weights)
        server = ApiServer(serving.server_context(state), listener=listener)
        read = partial(sampler.engine.row_weights.read, model=profile.model.path)
        with watch.phase("adapters"):
            for name, path in arguments.adapters.items():
                await server.parts.load_chosen(name, path, read)
        address = base_url(listener)
        until_drained = UntilDrained(lambda: show(console, serving, server.parts.context.models(), address))
        children = [
            *state.guards(profile.monitor),
            permanent(server, SERVER_RESTARTS),
            transient(until_drained),
        ]

        def drain() -> None:
            log.warning("draining", hint="running requests finish; interrupt again to stop at once")
            until_drained.drain()

        async with handle_signals(supervisor) as signals:
            await supervisor.run(children, on_drain=drain)
        finish_computation(compute, signals)
        return signals.exit_status


async def load(arguments: ServeArguments, compute: Compute) -> Sampler:
    """Load the model, in the decode thread, and make its sampler. Raises ModelError or ProfileError."""
    profile = arguments.profile
    base = await finish(compute.decode.submit(lambda: load_served(arguments)))
    threads = OwnThreads(compute=compute, settings=profile.engine, adapters=profile.server.adapters)
    return await run_sync(lambda: Sampler(base, threads=threads))


def load_served(arguments: ServeArguments) -> BaseModel | Policy:
    """Load what is served: the policy of a training run if clients replace its weights, otherwise the base model."""
    profile = arguments.profile
    find_model(profile.model.path)
    adapters = profile.server.adapters if arguments.adapters or profile.server.adapters.root else None
    limit_memory(serving_memory(profile.model, profile.engine, profile.sampling, adapters), profile.memory)
    if not any(REPLACES_WEIGHTS(profile.server)):
        return BaseModel(profile.model)
    return load_policy(profile.model, profile.policy, seed=0, keep_reference=False)


def served_base(arguments: ServeArguments, base: BaseModel | Policy, weights: Latest[WeightsReady]) -> ServedModel:
    """Return the base model, or the policy, as requests name it.

    Without a name of its own it is also `policy`, as in a run, unless an adapter has this name.
    """
    path = arguments.profile.model.path
    files = base.files or find_model(path)
    root = relative_path(path)
    name = arguments.model_name or root
    usual = {arguments.profile.server.model_name} - arguments.adapters.keys()
    aliases = names_of(path, files) | {root} | usual
    return ServedModel(id=name, aliases=aliases - {name}, root=root, weights=lambda: weights.value)


def show(console: Console, serving: Serving, models: Sequence[ServedModel], address: str) -> None:
    """Print the start-up screen."""
    for line in screen(serving, models, address):
        print_line(console, line)


def screen(serving: Serving, models: Sequence[ServedModel], address: str) -> Iterator[str]:
    """Return the lines of the start-up screen: machine, compute path, model, memory, names, address."""
    profile, base = serving.arguments.profile, serving.sampler.policy.description
    blas, engine = load_blas(), serving.sampler.engine
    yield from machine_lines(describe_machine(blas=blas), backend().compute_path(blas, decodes=engine.has_row_decoder))
    bits = f", {base.quantization_bits} bits" if base.quantization_bits else ""
    yield (
        f"model    {relative_path(profile.model.path)}: {base.architecture}, {size(base.parameters)} parameters, "
        f"{base.layers} layers{bits}, {base.dtype}; context {base.context_length} tokens, {memory(base.bytes)}"
    )
    yield f"serves   {', '.join(model.id for model in models)}"
    yield f"API      {address}/v1"
