"""A Ray cluster of several nodes on this machine, in a process of its own.

`python -m tests.e2e.local_cluster` starts a head node without devices, and prints its address and the process ids of
its raylet and its GCS. For each line `add`, it adds a node with one device, and prints the process id of its raylet.
The cluster ends with the standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from attachments.cluster.connection import ENVIRONMENT

ROOT = Path(__file__).parents[2]
FAULTS = "CLOTHO_TEST_FAULTS"
"""Variable with the directory that `tests.e2e.faulty_worker` watches."""


HEAD = ("raylet", "gcs_server")
"""Processes of the head node."""


class LocalCluster:
    """The cluster as a test sees it. faults: directory of faults, which the workers of all nodes watch.

    head: the processes of the head node, `raylet` and `gcs_server`. nodes: the raylets of the other nodes.
    """

    def __init__(self, faults: Path) -> None:
        self.faults = faults
        self.nodes: list[psutil.Process] = []
        hooks = Path(__file__).parent / "faulty_worker"
        paths = os.pathsep.join([str(hooks), str(ROOT)])
        variables = ENVIRONMENT | {FAULTS: str(faults), "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.local_cluster"],
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._read()
        self.head = {kind: psutil.Process(int(self._read())) for kind in HEAD}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        started = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for process in started:
            if process.is_running():
                process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def add_node(self) -> None:
        """Start a node with one device."""
        assert self._process.stdin is not None
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        self.nodes.append(psutil.Process(int(self._read())))

    def _read(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("> "):
                return line.removeprefix("> ").strip()
        raise AssertionError("the cluster did not start")


def _serve() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    _print(cluster.address)
    for kind in HEAD:
        _print(_process(cluster.head_node, kind))
    for _ in sys.stdin:
        _print(_process(cluster.add_node(num_cpus=1, resources={"mlx": 1}), "raylet"))
    cluster.shutdown()  # type: ignore[no-untyped-call]


def _process(node: Any, kind: str) -> int:
    [process] = node.all_processes[kind]
    pid: int = process.process.pid
    return pid


def _print(text: object) -> None:
    sys.stdout.write(f"> {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
