"""A rollout worker as the run sees it; the actor is an engine in this process, and Ray starts no cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_map

from attachments.cluster.messages import Published
from attachments.cluster.ray_worker import PublishedWeights, RayWorker
from attachments.cluster.rollout_engine import RolloutEngine
from attachments.cluster.tests.test_rollout_engine import small_settings
from attachments.remote.server import RemoteFailure
from attachments.remote.weights import Weights
from clotho.models.parameters import fingerprint
from protocols.step import WeightsReady
from tests.saved_models import save


class Actor:
    """An actor whose methods run in this process.

    objects: the object store. damages: new objects lose a byte. patched: whether each push had patches.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.objects: list[bytes] = []
        self.patched: list[bool] = []
        self.damages = False
        self._engine = engine
        self.served = SimpleNamespace(remote=lambda: self._reply(self._served()))
        self.replace = SimpleNamespace(remote=lambda *values: self._reply(self._replace(*values)))
        self.__dict__["__ray_ready__"] = SimpleNamespace(remote=lambda: self._reply(self._served()))

    def put(self, content: bytes) -> int:
        """Store an object; return its reference."""
        self.objects.append(content[:-1] if self.damages else content)
        return len(self.objects) - 1

    async def _served(self) -> bytes:
        return msgspec.msgpack.encode(self._engine.served())

    async def _replace(self, published: bytes, *references: int) -> bytes:
        description = msgspec.msgpack.decode(published, type=Published)
        self.patched.append(description.patched)
        served = await self._engine.replace(description, [self.objects[reference] for reference in references])
        return msgspec.msgpack.encode(served)

    def _reply(self, work: Coroutine[Any, Any, bytes]) -> Any:
        future: Future[bytes] = asyncio.run_coroutine_threadsafe(work, asyncio.get_running_loop())
        return SimpleNamespace(future=lambda: self._failing(future))

    @staticmethod
    def _failing(found: Future[bytes]) -> Future[bytes]:
        """Return the future of a reply; exceptions are those of Ray, which names the cause."""
        from ray.exceptions import RayTaskError

        reply: Future[bytes] = Future()

        def set_result(done: Future[bytes]) -> None:
            error = done.exception()
            if error is None:
                reply.set_result(done.result())
            else:
                reply.set_exception(RayTaskError("replace", str(error), error))  # type: ignore[no-untyped-call]

        found.add_done_callback(set_result)
        return reply


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    """The engine of a worker with a tiny policy."""
    engine = RolloutEngine(small_settings(save(tmp_path_factory.mktemp("worker") / "base")))
    yield engine
    engine.close()


async def test_after_a_patch_that_cannot_be_applied_the_worker_gets_the_whole_weights(engine: RolloutEngine) -> None:
    """The next version is a patch again. The sizes of what was sent are counted."""
    versions = [engine.parameters()]
    for row in range(3):
        versions.append(tree_map(lambda array, row=row: array.at[row].add(0.5), versions[-1]))
    mx.eval(versions)
    weights = [
        Weights(ready=WeightsReady(version=number, step=number, fingerprint=fingerprint(one)), parameters=one)
        for number, one in enumerate(versions)
    ]
    actor = Actor(engine)
    worker = RayWorker(
        "worker-0", actor, weights=PublishedWeights(actor.put, start=weights[0]), run_id="run", timeout_seconds=60.0
    )
    await worker.served()
    await worker.push(weights[1])
    actor.damages = True
    with pytest.raises(RemoteFailure):
        await worker.push(weights[2])
    actor.damages = False
    assert engine.served().fingerprint == weights[1].ready.fingerprint
    await worker.served()
    await worker.push(weights[2])
    await worker.push(weights[3])
    assert actor.patched == [True, True, False, True]
    assert engine.served().fingerprint == weights[3].ready.fingerprint
    assert worker.traffic.sent == sum(map(len, actor.objects)) + 1


async def test_an_actor_that_has_died_before_it_is_ready_is_a_failure_of_its_server(engine: RolloutEngine) -> None:
    """As any other error of Ray. The run does not go on with it."""
    from ray.exceptions import RayActorError

    died: Future[bytes] = Future()
    died.set_exception(RayActorError())
    actor = Actor(engine)
    actor.__dict__["__ray_ready__"] = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: died))
    start = Weights(ready=WeightsReady(version=0, step=0, fingerprint=""), parameters=engine.parameters())
    weights = PublishedWeights(actor.put, start=start)
    with pytest.raises(RemoteFailure):
        await RayWorker("worker-0", actor, weights=weights, run_id="run", timeout_seconds=60.0).served()
