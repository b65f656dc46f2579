"""Runs whose rollouts are sampled by workers on a local Ray cluster, in processes that are killed and stopped."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from tests.e2e.pipeline_process import Run
from tests.e2e.test_cluster_faults import PAUSE, WITHOUT_EVALUATION, assert_every_group_ended_once
from tests.e2e.test_remote import LONG_SECONDS, accuracy, events

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

RAY_ABORT_SECONDS = 5.0
"""Longer than the time that Ray's handler of SIGTERM gives a process."""


def cluster(workers: int) -> tuple[str, ...]:
    """Return the flags of a run that starts a cluster with so many workers."""
    return ("--cluster", "ray", "--cluster.address", "local", "--cluster.workers", str(workers))


def worker_processes(run: Run) -> list[psutil.Process]:
    """Return the processes of the workers of a run."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "ray::RolloutWorker" in " ".join(child.cmdline())]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of the steps."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_survives_workers_that_are_killed_and_stopped(tmp_path: Path) -> None:
    """Every group ends once. Ray starts the killed worker again, and both get groups again."""
    run_dir = tmp_path / "run"
    with Run(run_dir, "--steps", "400", "--eval.interval", "0", *cluster(2), patience_seconds=LONG_SECONDS) as running:
        running.wait_until(lambda: len(events(run_dir, "remote_server_ready")) >= 2)
        killed, stopped = worker_processes(running)
        killed.send_signal(signal.SIGKILL)
        running.wait_until(lambda: len(events(run_dir, "remote_server_ready")) >= 3)
        stopped.send_signal(signal.SIGSTOP)
        running.wait_until(lambda: len(events(run_dir, "remote_server_failed")) >= 2)
        stopped.send_signal(signal.SIGCONT)
        running.wait_until(lambda: len(events(run_dir, "remote_server_ready")) >= 4)
        running.send(signal.SIGINT)
        result = running.finish()
    assert result.accounting.prompted > 0
    assert {event["server"] for event in events(run_dir, "remote_server_failed")} == {"worker-0", "worker-1"}
    assert sum(server["restarts"] for server in metrics(run_dir)[-1]["remote_servers"].values()) >= 1


def listeners(process: psutil.Process) -> set[str]:
    """Return the addresses on which a process and its children accept connections, IPv4 addresses as such."""
    found = set()
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}


def test_a_cluster_of_one_machine_listens_on_loopback_and_drains_on_sigterm(tmp_path: Path) -> None:
    """A group is scored for longer than the time after which Ray's own handler of SIGTERM would abort the process."""
    run_dir, directory, file = tmp_path / "run", tmp_path / "scoring", tmp_path / "pause.py"
    directory.mkdir()
    (directory / "pause").touch()
    file.write_text(PAUSE.format(directory=str(directory)), encoding="utf-8")
    reward = f'{{name = "{file}:pauses", correct = true, timeout_seconds = {LONG_SECONDS}}}'
    flags = ("--rewards", f"[{reward}]", "--steps", "100000", "--eval", "off", *cluster(1))
    with Run(run_dir, *flags, small=WITHOUT_EVALUATION, patience_seconds=LONG_SECONDS) as running:
        running.wait_until(lambda: bool(list(directory.glob("[0-9]*"))))
        assert listeners(psutil.Process(running.process.pid)) == {"127.0.0.1"}
        running.send(signal.SIGTERM)
        until = time.monotonic() + RAY_ABORT_SECONDS
        running.wait_until(lambda: time.monotonic() > until)
        (directory / "pause").unlink()
        result = running.finish()
    assert result.status == 0, result
    assert_every_group_ended_once(run_dir, result)


def test_a_synchronous_run_with_one_worker_equals_a_run_without(tmp_path: Path) -> None:
    """The adapters are equal byte by byte."""
    digests = []
    for name, flags in (("without", ()), ("with", cluster(1))):
        run_dir = tmp_path / name
        with Run(run_dir, "--steps", "4", "--async", "false", "--eval.interval", "0", *flags) as running:
            result = running.finish()
        assert result.status == 0, result.err
        digests.append(hashlib.sha256((run_dir / "adapters" / "adapters.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_a_synchronous_run_with_rewards_on_the_cluster_equals_a_run_without(tmp_path: Path) -> None:
    """The adapters are equal byte by byte, and a function that crashes costs its groups only."""
    names, digests = ("async_length", "unreliable"), []
    for where, flags in (("local", ()), ("cluster", cluster(1))):
        run_dir = tmp_path / where
        functions = [f'name = "tests.rewards.sample_rewards:{name}", timeout_seconds = 5.0' for name in names]
        rewards = ", ".join(f'{{{function}, correct = true, where = "{where}"}}' for function in functions)
        sync = ("--steps", "4", "--async", "false", "--eval.interval", "0")
        with Run(run_dir, *sync, "--rewards", f"[{rewards}]", *flags, patience_seconds=LONG_SECONDS) as running:
            result = running.finish()
        assert result.status == 0, result.err
        digests.append(hashlib.sha256((run_dir / "adapters" / "adapters.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_a_run_with_two_workers_learns_as_much_as_without(tmp_path: Path) -> None:
    """The complete default profile, with every rollout from the workers."""
    run_dir = tmp_path / "run"
    port = ("--server.port", "0")
    with Run(run_dir, *cluster(2), small=port, patience_seconds=LONG_SECONDS) as running:
        result = running.finish()
    assert result.status == 0, result.err
    before, after = accuracy(run_dir)
    assert before < 0.6
    assert after > 0.9
    assert {name for name, server in metrics(run_dir)[-1]["remote_servers"].items() if server["groups"]} == {
        "worker-0",
        "worker-1",
    }


def test_weights_that_are_trained_in_full_take_few_bytes_per_version(tmp_path: Path) -> None:
    """In bfloat16 at the learning rate 1e-6, a worker gets patches; requests included, below 10 % of whole weights."""
    run_dir = tmp_path / "run"
    full = ("--policy.method", "full", "--model.dtype", "bfloat16", "--learner.optimizer.learning-rate", "1e-6")
    with Run(run_dir, "--steps", "6", "--eval.interval", "0", *full, *cluster(1)) as running:
        result = running.finish()
    assert result.status == 0, result.err
    last = metrics(run_dir)[-1]
    server = last["remote_servers"]["worker-0"]
    with safe_open(ROOT / "profiles" / "embedded" / "model.safetensors", framework="numpy") as file:
        whole = 2 * sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert server["version"] >= 4
    assert server["bytes_sent"] < 0.1 * whole * server["version"]
    assert server["bytes_received"] > 0
    assert not events(run_dir, "remote_server_failed")


def test_the_engine_of_the_run_takes_its_share(tmp_path: Path) -> None:
    """`cluster.local_share` counts rows of the run's engine against rows of a worker."""
    run_dir = tmp_path / "run"
    share = ("--cluster.local-share", "1.0")
    with Run(run_dir, "--steps", "30", "--eval.interval", "0", *cluster(1), *share) as running:
        result = running.finish()
    assert result.status == 0, result.err
    assert set(metrics(run_dir)[-1]["remote_servers"]) == {"local", "worker-0"}


def test_a_run_without_a_cluster_is_refused(tmp_path: Path) -> None:
    """The error names the key and the command that starts a cluster."""
    with Run(tmp_path / "run", "--steps", "1", "--cluster", "ray", environment={"RAY_ADDRESS": ""}) as running:
        result = running.finish()
    assert result.status == 2
    assert "cluster.address" in result.err
