"""The connection to a Ray cluster, and the rollout workers that it starts."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec
import structlog

from clotho.cluster.messages import RESOURCE, WorkerSettings
from clotho.cluster.worker_process import RolloutWorker
from clotho.config.sections_generation import RayCluster
from protocols.errors import ProfileError, visible

log = structlog.get_logger(actor="cluster")

T = TypeVar("T")

LOCAL = "local"
LOCAL_OBJECT_BYTES = 512 * 2**20
"""Size of the object store of a cluster that the run starts: room for several versions of an adapter."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_raylet_start_wait_time_s": "120",
}
"""Variables that Ray reads: no report leaves the machine, clusters of Macs are permitted, a late call starts no
new cluster after `close`, Ray does not change the variables of accelerators, and a busy machine may start slowly."""


class _LastingThread:
    """Runs one function after the other in a daemon thread, which lives as long as the process.

    The processes of a local cluster receive SIGKILL when the thread ends that has started them. Cancellation of a
    caller therefore does not interrupt the function.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="ray", daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of a function, or raise its exception."""
        future: Future[T] = Future()
        self._work.put((work, future))
        return await asyncio.wrap_future(future)

    def _serve(self) -> None:
        while True:
            work, future = self._work.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)


class RayConnection:
    """A cluster that the run uses until `close`. Ray's blocking calls run in a thread of their own.

    Ray stays unimported until `connect`: it is an optional package.
    """

    def __init__(self, settings: RayCluster) -> None:
        self._settings = settings
        self._started = 0
        self._thread = _LastingThread()

    async def connect(self) -> None:
        """Connect to the cluster, or start one on this machine. Raises ProfileError."""
        await self._thread.run(self._connect)

    def _connect(self) -> None:
        """Ray sets a handler of SIGTERM in the main thread only; the run has handlers of its own."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise ProfileError("cluster needs the package ray: pip install -e '.[ray]'") from error
        address, workers = self._settings.address, self._settings.workers
        options: dict[str, Any] = {"address": address}
        if address == LOCAL:
            units = float(workers) if isinstance(workers, int) else 1.0
            options = {
                "address": LOCAL,
                "resources": {RESOURCE: units},
                "object_store_memory": LOCAL_OBJECT_BYTES,
                "include_dashboard": False,
            }
        try:
            logging.getLogger("ray").setLevel(logging.ERROR)
            ray.init(**options, configure_logging=False, log_to_driver=False)
        except Exception as error:  # Ray raises plain exceptions
            where = visible(str(error).splitlines()[0] if str(error) else type(error).__name__, 200)
            start = f"`ray start --head --resources='{{\"{RESOURCE}\": 1}}'`"
            raise ProfileError(
                f"cluster.address: no Ray cluster at {visible(address, 200)}: {where}; start one with {start}, or set "
                "cluster.address to local"
            ) from error

    async def new_workers(self, settings: WorkerSettings) -> Sequence[tuple[str, Any]]:
        """Start workers for devices that have none; return name and actor of each.

        With `workers = "all"`, the devices are the units of the resource `mlx` of all machines that are alive. A worker
        whose machine has left waits for another device, so that their number never falls.
        """
        encoded = msgspec.msgpack.encode(settings)
        return await self._thread.run(lambda: self._new_workers(encoded))

    def _new_workers(self, settings: bytes) -> list[tuple[str, Any]]:
        import ray

        wanted = self._settings.workers
        if wanted == "all":
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            wanted = int(resources.get(RESOURCE, 0.0))
        actor_class = ray.remote(RolloutWorker)
        found = []
        for number in range(self._started, wanted):
            actor = actor_class.options(
                num_cpus=0, resources={RESOURCE: 1.0}, max_restarts=-1, max_concurrency=1024
            ).remote(settings)
            found.append((f"worker-{number}", actor))
            log.info("worker_requested", worker=f"worker-{number}")
        self._started = max(self._started, wanted)
        return found

    async def close(self) -> None:
        """Disconnect. A cluster that the run has started ends."""
        await self._thread.run(self._close)

    def _close(self) -> None:
        import ray

        ray.shutdown()
