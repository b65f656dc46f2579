"""A remote inference server in this process, whose connection a test can break, and the training run that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import anyio
import httpx
import mlx.core as mx
from mlx.utils import tree_map

from attachments.remote.policy_receiver import SwappingReceiver
from attachments.remote.routes import PolicyRoutes
from attachments.remote.sampler import RemoteSampler
from attachments.remote.sections import WEIGHTS_ROOT
from attachments.remote.server import RemoteServer
from attachments.remote.weights import Weights
from clotho.lanes.compute_thread import finish
from clotho.lanes.sampling_client import EngineSampler
from clotho.models.parameters import fingerprint, layout
from clotho.sampler import ReplaceablePolicy
from clotho.scoring.prompt_logprobs import PromptScorer
from clotho.scoring.token_scores import SamplingDistribution
from clotho.serving.app import build_app
from clotho.serving.limits import ConcurrencyLimit
from clotho.serving.parts import Handlers, ServerParts
from clotho.serving.services import HealthReport, ServedModel, ServerContext
from clotho.settings.engine import SamplingSection
from clotho.settings.server import HttpServer
from protocols.sampling import POLICY, PromptLogprobs, SampleRequest, completion_seeds
from protocols.step import PolicyUpdated, TrainedGroup, WeightsReady
from tests.actors.actor_helpers import compute_thread, policy_updated, served_policy
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue

PROMPT = (5, 9, 33, 2, 17, 60)
SAMPLING = SamplingSection(temperature=1.0, max_tokens=6, ignore_eos=True)

Change = Callable[[httpx.Request, bytes], bytes]
"""Replaces the body of a response."""


def group(seed: int = 0, *, rows: int = 2, **changes: Any) -> SampleRequest:
    """Return the request of a group."""
    fields: dict[str, Any] = {"prompt": PROMPT, "sampling": SAMPLING, "seeds": completion_seeds(seed, rows)}
    return SampleRequest(**(fields | changes))


class Connection(httpx.AsyncBaseTransport):
    """The connection to a server.

    down: requests fail. hangs: as with a stopped process, requests get no answer; questions about the state run out of
    time at once. holds: rollouts get no answer. delayed: rollouts wait for it. change: replaces the bodies of
    responses. calls: requests.
    """

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app)
        self.down = self.hangs = self.holds = False
        self.change: Change | None = None
        self.delayed: anyio.Event | None = None
        self.calls: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass a request on, unless the connection is broken."""
        self.calls.append(f"{request.method} {request.url.path}")
        if self.down:
            raise httpx.ConnectError("refused by the test")
        if self.hangs and request.method == "GET":
            raise httpx.ReadTimeout("out of time")
        if self.hangs or (self.holds and request.method == "POST"):
            await anyio.sleep_forever()
        if self.delayed and request.method == "POST":
            await self.delayed.wait()
        response = await self._inner.handle_async_request(request)
        if self.change is None:
            return response
        body = self.change(request, await response.aread())
        return httpx.Response(response.status_code, stream=httpx.ByteStream(body))


class InferenceServer:
    """A tiny policy behind the application of the HTTP server."""

    def __init__(
        self, stack: ExitStack, directory: Path, *, accepts_weights: bool = True, weights_root: str = ""
    ) -> None:
        self.compute = stack.enter_context(compute_thread())
        self.policy, self.engine = served_policy(self.compute, directory)
        self.compute.decode.attach(self.engine)
        self.scorer = PromptScorer(self.policy.copy_model(), chunk=64)
        self.weights = Latest[WeightsReady]("weights")
        self.weights.put(WeightsReady(version=0, step=0, fingerprint=self.policy.fingerprint))
        replaceable = ReplaceablePolicy(
            policy=self.policy, engine=self.engine, compute=self.compute, weights=self.weights
        )
        model = ServedModel(id="policy", root="policy", weights=lambda: self.weights.value)
        context = ServerContext(
            sampler=EngineSampler(self.compute.decode.submit, self.engine),
            tokenizer=self.policy.tokenizer,
            settings=WEIGHTS_ROOT.put(HttpServer(port=0), weights_root),
            models=lambda: [model],
            sampling=SAMPLING,
            prompt_logprobs=self.prompt_logprobs,
            weights=lambda: self.weights.value,
            health=lambda: HealthReport(status="ok"),
            context_length=self.policy.context_length,
            vocab_size=self.policy.vocab_size,
            replaceable=replaceable if accepts_weights else None,
        )
        self.parts = ServerParts(context)
        self.connection = Connection(build_app(self.parts, ConcurrencyLimit(8)))

    @property
    def receiver(self) -> SwappingReceiver:
        """What replaces the served weights."""
        (put,) = (one.handle for one in self.parts.endpoints if one.method == "PUT")
        assert isinstance(put, partial)
        assert isinstance(put.func, MethodType)
        assert isinstance(put.func.__self__, Handlers)
        routes = put.func.__self__.loaded
        assert isinstance(routes, PolicyRoutes)
        receiver = routes.receiver
        assert isinstance(receiver, SwappingReceiver)
        return receiver

    def client(self, port: int = 8000, **changes: Any) -> RemoteServer:
        """Return a client of this server, under an address of its own."""
        return RemoteServer(f"http://127.0.0.1:{port}", run_id="run", transport=self.connection, **changes)

    async def prompt_logprobs(self, tokens: tuple[int, ...], top: int, _: str = POLICY) -> PromptLogprobs:
        """Score tokens with the served weights."""
        distribution = SamplingDistribution(1.0, SAMPLING.logit_bias)
        parameters, version = await finish(self.compute.decode.submit(self.policy.served))
        return await finish(
            self.compute.scoring.submit(
                lambda: self.scorer.score(parameters, tokens, version=version, top=top, distribution=distribution)
            )
        )

    def moved(self, shift: float) -> tuple[Any, str]:
        """Return the served parameters with `shift` added to every parameter, and their fingerprint."""

        def move() -> tuple[Any, str]:
            parameters = tree_map(lambda array: array + shift, self.policy.trainable())
            mx.eval(parameters)
            return parameters, fingerprint(parameters)

        return self.compute.decode.submit(move).result()


class TrainingRun:
    """The part of a training run that the remote sampler uses; its policy is that of `local`."""

    def __init__(self, local: InferenceServer) -> None:
        self.local = local
        self.updates = Queue[PolicyUpdated]("updates", capacity=4)
        self.outbox = self.updates.outbox()
        self.weights = Latest[WeightsReady]("weights")
        self.weights.put(local.weights.value)

    def sampler(self, *servers: RemoteServer, **changes: Any) -> RemoteSampler:
        """Return the sampler of the run."""
        parameters = self.local.policy.trainable()
        settings: dict[str, Any] = {
            "updates": self.updates.inbox(), "weights": self.weights,
            "start": Weights(ready=self.weights.value, parameters=parameters), "layout": layout(parameters),
            "vocab_size": self.local.policy.vocab_size, "decode": self.local.policy.tokenizer.decode, "run_id": "run",
            "sync_interval": 1, "probe_prompt": PROMPT,
            "recompute": lambda tokens, _: self.local.prompt_logprobs(tokens, 0), "sampling": SAMPLING,
            "patience_seconds": 60.0,
        }  # fmt: skip
        return RemoteSampler(servers, **(settings | changes))

    async def update(
        self, version: int, shift: float = 0.05, *, announce: bool = True, trained: tuple[TrainedGroup, ...] = ()
    ) -> str:
        """Send the update of a batch, and announce it as the broadcaster does; return the fingerprint."""
        parameters, digest = self.local.moved(shift)
        update = policy_updated(parameters, step=version, version=version, fingerprint=digest, trained=trained)
        publish: dict[str, Any] = {"version": version, "step": version, "fingerprint": digest}
        self.local.compute.decode.submit(lambda: self.local.policy.publish(parameters, **publish)).result()
        await self.outbox.send(update)
        if announce:
            self.weights.put(WeightsReady(version=version, step=version, fingerprint=digest))
        return digest


@contextmanager
def servers(directory: Path, count: int) -> Iterator[list[InferenceServer]]:
    """Yield inference servers with equal policies."""
    with ExitStack() as stack:
        yield [InferenceServer(stack, directory / str(number)) for number in range(count)]


@asynccontextmanager
async def running(sampler: RemoteSampler, *, usable: int = 1) -> AsyncIterator[None]:
    """Run the sampler until the block ends; the block starts when so many servers can be used."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        await until(lambda: sum(place.version is not None for place in sampler._places) >= usable)
        yield
        tasks.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. Raises TimeoutError after a minute."""
    with anyio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - the sampler tells nobody
            await anyio.sleep(0.005)
