"""The connection to a Ray cluster, and the rollout workers that it starts."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import structlog

from attachments.cluster.messages import RESOURCE, EngineWorkerSettings
from attachments.cluster.sections import RayCluster
from attachments.cluster.worker_process import RolloutWorker
from protocols.errors import ProfileError, RemoteError, visible
from training_run.local_network import local_network_hint
from training_run.supervision.lasting_thread import LastingThread
from training_run.supervision.signals import reinstall_handlers

log = structlog.get_logger(actor="cluster")

T = TypeVar("T")

LOCAL = "local"
LOCAL_OBJECT_BYTES = 512 * 2**20
"""Size of the object store of a cluster that the run starts: room for several versions of an adapter."""

CONNECT_SECONDS = 2.0
"""Time in which Ray's processes must accept a connection. Later, they may be stopped."""

CLOSE_SECONDS = 10.0
"""Time for the cluster to end. The process then ends without it."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_raylet_start_wait_time_s": "120",
}
"""Variables that Ray reads: no report leaves the machine, clusters of Macs are permitted, a late call starts no
new cluster after `close`, Ray does not change the variables of accelerators, and a busy machine may start slowly."""

ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Variables for a cluster of this machine alone: on every system, Ray's processes then listen on 127.0.0.1 only."""


class RayConnection:
    """A cluster that the run uses until `close`. Ray's blocking calls run in a thread of their own.

    Ray stays unimported until `connect`: it is an optional package.
    """

    def __init__(self, settings: RayCluster) -> None:
        self._settings = settings
        self._started = 0
        self._connected = self._lost = False
        self._services: tuple[tuple[str, int], ...] = ()
        self._thread = LastingThread("ray")  # processes of a local cluster receive SIGKILL when their thread ends

    async def connect(self) -> None:
        """Connect to the cluster, or start one on this machine, with the first call. Raises ProfileError.

        Ray's native code installs a handler of SIGTERM that aborts the process while it drains.
        """
        if self._connected:
            return
        try:
            await self._thread.run(self._connect)
        finally:
            reinstall_handlers()

    def _connect(self) -> None:
        if self._connected:
            return
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._settings.address == LOCAL:
            os.environ |= ONE_MACHINE
        import ray
        import ray._private.worker as internals

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
            internals._worker_logs_enabled = False  # Ray has no option that keeps messages of raylets off the terminal
        except Exception as error:  # Ray raises plain exceptions
            where = visible(str(error).splitlines()[0] if str(error) else type(error).__name__, 200)
            start = f"`ray start --head --resources='{{\"{RESOURCE}\": 1}}'`"
            raise ProfileError(
                f"cluster.address: no Ray cluster at {visible(address, 200)}: {where}; start one with {start}, or set "
                "cluster.address to local"
            ) from error
        self._connected = True
        here, head = ray.get_runtime_context().get_node_id(), ray.get_runtime_context().gcs_address
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        [node] = [node for node in nodes if node["NodeID"] == here]
        host, _, port = head.rpartition(":")
        self._services = ((node["NodeManagerAddress"], node["NodeManagerPort"]), (host, int(port)))

    def check(self) -> None:
        """Raise RemoteError if Ray has ended on this machine or on the head machine. Blocks for `CONNECT_SECONDS`.

        Ray ends the process with its next access to an object store that has ended, without a message.
        """
        for host, port in self._services:
            try:
                socket.create_connection((host, port), CONNECT_SECONDS).close()
            except TimeoutError:
                continue  # it is stopped, or busy
            except OSError as error:
                self._lost = True
                raise RemoteError(
                    f"Ray has ended at {host}:{port} ({error.strerror or error}): start the cluster again, and "
                    f"continue the run with --resume{local_network_hint(error, host)}"
                ) from error

    def put(self, content: bytes) -> Any:
        """Put an object into the store; return its reference. Blocks. Raises RemoteError if Ray has ended."""
        import ray

        self.check()
        return ray.put(content)

    async def new_workers(self, settings: EngineWorkerSettings) -> Sequence[tuple[str, Any]]:
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

    async def new_actor(self, kind: type, *arguments: object, **options: Any) -> Any:
        """Create an actor of a class, with options of Ray; return its handle."""
        return await self._thread.run(lambda: self._new_actor(kind, arguments, options))

    def _new_actor(self, kind: type, arguments: Sequence[object], options: dict[str, Any]) -> Any:
        import ray

        return ray.remote(kind).options(**options).remote(*arguments)

    def end_actor(self, actor: Any) -> None:
        """End an actor, without waiting for its end."""
        self._thread.submit(lambda: self._end_actor(actor))

    def _end_actor(self, actor: Any) -> None:
        import ray

        ray.kill(actor)

    def close(self) -> None:
        """Disconnect. A cluster that the run has started ends."""
        with suppress(TimeoutError):
            self._thread.submit(self._close).result(CLOSE_SECONDS)

    def _close(self) -> None:
        if self._connected:
            import ray

            self._connected = False
            if self._lost:
                atexit.unregister(ray.shutdown)
                atexit.register(_exit_without_ray)
            else:
                ray.shutdown()


def _exit_without_ray() -> None:
    """End the process. Ray would end it with a segmentation fault, because its raylet has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(RemoteError.exit_status)
