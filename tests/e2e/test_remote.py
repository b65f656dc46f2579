"""A run whose rollouts are sampled by inference servers in processes of their own, which are killed and stopped."""

from __future__ import annotations

import json
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.pipeline_process import Run, run
from tests.e2e.test_serve import Server, serving

LONG_SECONDS = 1800.0
"""Upper limit of a complete run. No assertion depends on it."""

ACCEPTS = ("--server.accept-weights", "true", "--profile", "local-m3")


def flags(*servers: Server) -> tuple[str, ...]:
    """Return the flags of a run that uses these servers."""
    urls = [part for server in servers for part in ("--generator.server-url", server.url.removesuffix("/v1"))]
    return ("--generator", "remote", *urls)


def events(run_dir: Path, name: str) -> list[dict[str, object]]:
    """Return the events of this name."""
    path = run_dir / "log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.mark.slow
def test_a_run_survives_servers_that_are_killed_stopped_and_continued(tmp_path: Path) -> None:
    """Every group ends once, and all rollouts come from the servers; the continued server gets groups again."""
    run_dir = tmp_path / "run"
    with ExitStack() as stack:
        killed, stopped, steady = (stack.enter_context(serving(*ACCEPTS)) for _ in range(3))
        with Run(run_dir, "--steps", "12", *flags(killed, stopped, steady)) as running:
            running.wait_until(lambda: len(events(run_dir, "remote_server_ready")) >= 3)
            killed.process.send_signal(signal.SIGKILL)
            stopped.process.send_signal(signal.SIGSTOP)
            running.wait_until(lambda: len(events(run_dir, "remote_server_failed")) >= 2)
            stopped.process.send_signal(signal.SIGCONT)
            result = running.finish()
        served = httpx.get(f"{steady.url.removesuffix('/v1')}/v1/policy").json()
    assert result.status == 0, result.err
    assert result.accounting.prompted == 12 * 4
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    hashes = {line["policy_version"]: line["weights_hash"] for line in metrics}
    assert hashes.get(served["version"], served["fingerprint"]) == served["fingerprint"]
    assert served["version"] > 0


def accuracy(run_dir: Path) -> tuple[float, float]:
    """Return the accuracy of the first and of the last evaluation."""
    lines = (run_dir / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line)["accuracy"] for line in lines]
    return found[0], found[-1]


@pytest.mark.slow
def test_a_run_samples_on_mlx_lm_servers_that_it_restarts_with_each_adapter(tmp_path: Path) -> None:
    """The versions of the rollouts are those of the adapters, and no server of the run stays behind."""
    run_dir = tmp_path / "run"
    port = free_port()
    remote = ("--generator", "remote", "--generator.server-url", f"http://127.0.0.1:{port}")
    with Run(run_dir, "--steps", "4", "--async", "false", *remote, "--generator.weights", "restart") as running:
        result = running.finish()
    assert result.status == 0, result.err
    assert result.accounting.prompted == 4 * 4
    assert not events(run_dir, "remote_server_failed")
    assert len(events(run_dir, "remote_server_ready")) > 1
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert metrics[-1]["policy_version"] > 1
    assert all(line["mismatch_kl"] < 1e-6 for line in metrics if line["mismatch_kl"] is not None)
    (server,) = metrics[-1]["remote_servers"].values()
    assert server["groups"] == 4 * 4
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


@pytest.mark.slow
def test_a_run_shares_its_weights_by_path(tmp_path: Path) -> None:
    """Two servers read each version from the directory, and serve its fingerprint."""
    run_dir, shared = tmp_path / "run", tmp_path / "shared"
    accepts = (*ACCEPTS, "--server.weights-root", str(shared))
    by_path = ("--generator.weights", "path", "--generator.weights.directory", str(shared))
    with ExitStack() as stack:
        pair = [stack.enter_context(serving(*accepts)) for _ in range(2)]
        with Run(run_dir, "--steps", "4", *flags(*pair), *by_path) as running:
            result = running.finish()
    assert result.status == 0, result.err
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(metrics[-1]["remote_servers"]) == 2
    assert not events(run_dir, "remote_server_failed")
    assert [path.suffix for path in shared.iterdir()] == [".safetensors"]


@pytest.mark.slow
def test_a_run_with_two_servers_learns_as_much_as_without(tmp_path: Path) -> None:
    """The complete default profile, with every rollout from the servers."""
    run_dir = tmp_path / "run"
    with ExitStack() as stack:
        pair = [stack.enter_context(serving(*ACCEPTS, patience_seconds=LONG_SECONDS)) for _ in range(2)]
        with Run(run_dir, *flags(*pair), small=("--server.port", "0"), patience_seconds=LONG_SECONDS) as running:
            result = running.finish()
    assert result.status == 0, result.err
    before, after = accuracy(run_dir)
    assert before < 0.6
    assert after > 0.9


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number: int = probe.getsockname()[1]
        return number


def test_a_run_without_a_server_fails_with_its_address(tmp_path: Path) -> None:
    """After the permitted time; the run can be continued."""
    flags = ("--generator", "remote", "--generator.server-url", "http://127.0.0.1:9")
    result = run(tmp_path / "run", "--steps", "1", "--generator.patience-seconds", "0.5", *flags)
    assert result.status == 1
    assert "http://127.0.0.1:9" in result.err
    assert "--resume" in result.err
