"""One run on a cluster of several nodes, while processes are killed and stopped and workers return wrong data."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.local_cluster import HEAD, LocalCluster
from tests.e2e.pipeline_process import BATCH, SMALL, Run, RunResult
from tests.e2e.test_remote import LONG_SECONDS, events

pytestmark = pytest.mark.slow

NODES = 2
STOPPED_SECONDS = 20.0
WRONG_DATA = ("malformed", "fingerprint", "shapes", "tokens", "logprobs")
FAULTS = ("kill worker", "kill raylet", "kill node", "stop worker", *WRONG_DATA)
NUMBER_OF_FAULTS = 10

CLUSTER = ("--cluster", "ray", "--eval", "off")
WITHOUT_EVALUATION = SMALL[:-2]


def worker(raylet: psutil.Process) -> psutil.Process | None:
    """Return the process of the rollout worker of a node."""
    with suppress(psutil.NoSuchProcess):
        for child in raylet.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "ray::RolloutWorker" in " ".join(child.cmdline()):
                    return child
    return None


def kill_node(raylet: psutil.Process) -> None:
    """Kill all processes of a node."""
    for one in (raylet, *raylet.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            one.kill()


class Faults:
    """Makes faults in a running cluster, one after the other, and waits until the run has recovered from each."""

    def __init__(self, cluster: LocalCluster, running: Run) -> None:
        self._cluster, self._running = cluster, running

    def make(self, kind: str, number: int) -> None:
        """Make a fault at a node, by its number."""
        node = self._cluster.nodes[number % len(self._cluster.nodes)]
        failed = self._failures()
        process = worker(node)
        assert process is not None
        if kind == "kill worker":
            process.kill()
        elif kind == "kill raylet":
            node.kill()
        elif kind == "kill node":
            kill_node(node)
        elif kind == "stop worker":
            self._stop(process)
        else:
            (self._cluster.faults / kind).touch()
        self._wait(lambda: self._failures() > failed)
        if kind in ("kill raylet", "kill node"):
            self._cluster.nodes.remove(node)
            self._cluster.add_node()
        elif kind in WRONG_DATA:
            for file in self._cluster.faults.iterdir():
                file.unlink()
        self._measure_recovery(kind)

    def _stop(self, process: psutil.Process) -> None:
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + STOPPED_SECONDS
        self._wait(lambda: time.monotonic() > until)
        process.send_signal(signal.SIGCONT)

    def _measure_recovery(self, kind: str) -> None:
        """Wait until every node has a worker that gets groups; measure the time since it has a process."""
        self._wait(lambda: all(worker(node) for node in self._cluster.nodes))
        began = time.monotonic()
        self._wait(lambda: self._usable() == NODES)
        with (self._running.run_dir.parent / "recoveries.txt").open("a") as file:
            file.write(f"{kind}: {time.monotonic() - began:.1f} s\n")

    def _usable(self) -> int:
        """Return how many workers are in use, according to the event log."""
        state: dict[str, bool] = {}
        for event in log(self._running.run_dir):
            if event["event"] in ("remote_server_ready", "remote_server_failed"):
                state[event["server"]] = event["event"] == "remote_server_ready"
        return sum(state.values())

    def _failures(self) -> int:
        return len(events(self._running.run_dir, "remote_server_failed"))

    def _wait(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            time.sleep(0.05)  # a condition reads files and process tables
            return condition()

        self._running.wait_until(holds)


def log(run_dir: Path) -> list[dict[str, Any]]:
    """Return all events of a run."""
    lines = (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def groups(run_dir: Path) -> list[int]:
    """Return the numbers of the groups that have ended."""
    lines = (run_dir / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["group_id"] for line in lines]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A head node without devices, and nodes with one device each."""
    (tmp_path / "faults").mkdir()
    with LocalCluster(tmp_path / "faults") as made:
        for _ in range(NODES):
            made.add_node()
        yield made


def assert_every_group_ended_once(run_dir: Path, result: RunResult) -> None:
    """The accounting balances, and no group is recorded twice."""
    accounting = result.accounting
    ended = groups(run_dir)
    assert len(ended) == len(set(ended)) == accounting.trained + accounting.discarded
    assert accounting.prompted % BATCH == 0
    reasons = [json.loads(line)["reason"] for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert set(reasons) <= {None, "zero_variance"}


@pytest.mark.parametrize("seed", [0])
def test_ten_faults_lose_and_repeat_no_group(cluster: LocalCluster, tmp_path: Path, seed: int) -> None:
    """After each fault, every node has a worker with current weights again. The seed chooses the faults.

    `recoveries.txt` of the test's directory has the times.
    """
    chance = random.Random(seed)
    kinds = [*FAULTS, *chance.choices(FAULTS, k=NUMBER_OF_FAULTS - len(FAULTS))]
    chance.shuffle(kinds)
    run_dir = tmp_path / "run"
    flags = (*CLUSTER, "--cluster.address", cluster.address, "--steps", "100000")
    with Run(run_dir, *flags, small=WITHOUT_EVALUATION, patience_seconds=LONG_SECONDS) as running:
        running.wait_until(lambda: len(events(run_dir, "remote_server_ready")) >= NODES)
        faults = Faults(cluster, running)
        for kind in kinds:
            faults.make(kind, chance.randrange(NODES))
        running.send(signal.SIGINT)
        result = running.finish()
    assert result.status == 0, result
    assert_every_group_ended_once(run_dir, result)


PAUSE = """
import os, time
from pathlib import Path

def pauses(problem, completion):
    directory = Path({directory!r})
    (directory / str(os.getpid())).touch()
    while (directory / "pause").exists():
        time.sleep(0.01)
    return float(len(completion) % 5)
"""
"""A reward function that waits while a file exists, after it has shown its process in the same directory."""


def test_a_node_that_is_killed_while_it_scores_loses_no_group(cluster: LocalCluster, tmp_path: Path) -> None:
    """Another worker scores its groups again."""
    run_dir, directory, file = tmp_path / "run", tmp_path / "scoring", tmp_path / "pause.py"
    directory.mkdir()
    (directory / "pause").touch()
    file.write_text(PAUSE.format(directory=str(directory)), encoding="utf-8")
    reward = f'{{name = "{file}:pauses", correct = true, where = "cluster", timeout_seconds = {LONG_SECONDS}}}'
    flags = (*CLUSTER, "--cluster.address", cluster.address, "--rewards", f"[{reward}]", "--steps", "100000")

    def scoring() -> list[psutil.Process]:
        time.sleep(0.05)
        pids = {int(path.name) for path in directory.glob("[0-9]*")}
        return [node for node in cluster.nodes if pids & {one.pid for one in node.children(recursive=True)}]

    with Run(run_dir, *flags, small=WITHOUT_EVALUATION, patience_seconds=LONG_SECONDS) as running:
        running.wait_until(lambda: bool(scoring()))
        [node, *_] = scoring()
        kill_node(node)
        running.wait_until(lambda: bool(events(run_dir, "reward_worker_lost")))
        (directory / "pause").unlink()
        running.wait_until(lambda: (run_dir / "metrics.jsonl").exists())
        running.send(signal.SIGINT)
        result = running.finish()
    assert result.status == 0, result
    assert_every_group_ended_once(run_dir, result)


@pytest.mark.parametrize("process", HEAD)
def test_the_end_of_the_head_node_ends_the_run_which_can_be_resumed(
    cluster: LocalCluster, tmp_path: Path, process: str
) -> None:
    """The run names the cause in one line."""
    run_dir = tmp_path / "run"
    flags = (*CLUSTER, "--steps", "30", "--checkpoint.interval", "1")
    with Run(
        run_dir, *flags, "--cluster.address", cluster.address, small=WITHOUT_EVALUATION, patience_seconds=LONG_SECONDS
    ) as running:
        running.wait_until((run_dir / "checkpoints" / "step-000003").exists)
        cluster.head[process].kill()
        result = running.finish()
    assert result.status == 1, result
    [line] = result.err.strip().splitlines()
    assert "--resume" in line
    with Run(
        run_dir, "--resume", "--steps", "30", "--cluster", "off", "--eval", "off", small=WITHOUT_EVALUATION
    ) as running:
        resumed = running.finish()
    assert resumed.status == 0, resumed
    assert_every_group_ended_once(run_dir, resumed)
