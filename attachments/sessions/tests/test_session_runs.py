"""Runs that train on the sessions of the agent of docs/sessions.md, which uses OpenAI's client."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.pages import DOCS, blocks
from tests.docs.test_commands import free_port, is_ready
from tests.e2e.pipeline_process import FEW_PROBLEMS, Run, lines, metrics, run

AGENT = next(block.text for block in blocks(DOCS / "sessions.md") if block.file_name == "agent.py")
FLAGS = (
    "--profile", "local-m3", "--sessions", "http", "--sampling.group-size", "8", "--sampling.max-tokens", "24",
    "--learner.batch-size", "2", "--engine.kv-policy", "recompute", "--eval", "off", *FEW_PROBLEMS,
)  # fmt: skip


class Agent(threading.Thread):
    """Plays from the start of a run to its end. ended: set if the run has ended before its server has answered."""

    def __init__(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(daemon=True)
        self.port = port
        monkeypatch.setattr(sys, "argv", ["agent.py", f"http://127.0.0.1:{port}/v1"])
        self.ended = threading.Event()

    def run(self) -> None:
        """Wait for the server, and play."""
        while not is_ready(self.port):
            if self.ended.wait(0.02):
                return
        exec(compile(AGENT, "agent.py", "exec"), {"__name__": "agent"})


def test_an_agent_with_the_client_of_openai_trains_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sampler recorded of several turns equals what the learner computes; every session is counted once.

    Collapse detection sees the updates: their divergence is above the limit of this run.
    """
    limits = ("--collapse-detection.patience", "1", "--collapse-detection.update-kl-high", "1e-12")
    agent = Agent(free_port(), monkeypatch)
    agent.start()
    try:
        result = run(tmp_path, *FLAGS, "--server.port", str(agent.port), "--steps", "2", *limits, small=())
    finally:
        agent.ended.set()
        agent.join()
    assert result.status == 0, result.err
    recorded = metrics(tmp_path)
    assert [line["update_applied"] for line in recorded] == [True, True]
    assert recorded[0]["mismatch_kl"] < 1e-9
    assert recorded[-1]["sessions/rewarded"] >= 2 * 16
    assert (recorded[-1]["sessions/forked"], recorded[-1]["sessions/refused"]) == (0, {})
    assert "update_too_large" in {finding["name"] for finding in recorded[-1]["findings"]}
    groups = lines(tmp_path / "rollouts.jsonl")
    assert {len(group["completions"]) for group in groups} == {8}
    assert any(" has more. How many " in one["text"] for group in groups for one in group["completions"])
    (balance,) = [line for line in result.out.splitlines() if line.startswith("sessions ")]
    assert " = trained 32 + " in balance


@pytest.mark.slow  # three starts
def test_a_killed_run_resumes_and_refuses_receipts_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that had not ended at the checkpoint are counted as lost."""
    run_dir, port = tmp_path / "run", free_port()
    flags = (*FLAGS, "--server.port", str(port), "--checkpoint.interval", "1", "--steps", "4")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "user": "left", "max_tokens": 4}
    address = f"http://127.0.0.1:{port}/v1"
    with Run(run_dir, *flags, small=()) as running:
        running.wait_until(lambda: is_ready(port))
        receipt = httpx.post(f"{address}/chat/completions", json=body).headers["x-clotho-receipt"]
        agent = Agent(port, monkeypatch)
        agent.start()
        running.wait_until(lambda: (run_dir / "checkpoints" / "step-000001").is_dir())
        running.kill(after_seconds=0.0)
        agent.join()
    with Run(run_dir, *flags, "--resume", small=()) as running:
        running.wait_until(lambda: is_ready(port))
        for post, expected in (({"receipts": [receipt]}, (410, "restarted")), ({"session": "left"}, (404, "unknown"))):
            answer = httpx.post(f"{address}/rewards", json={**post, "reward": 1.0})
            assert (answer.status_code, answer.json()["error"]["code"]) == expected
        agent = Agent(port, monkeypatch)
        agent.start()
        result = running.finish()
        agent.join()
    assert result.status == 0, result.err
    assert metrics(run_dir)[-1]["sessions/dropped"]["lost"] >= 1
    assert result.accounting.trained == 4 * 2


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--async", "false"), "async"),
        (("--server", "off"), "server"),
        (("--atropos", "mock"), "atropos"),
        (("--learner.objective.dynamic-sampling-max-ratio", "2.0"), "learner.objective.dynamic_sampling_max_ratio"),
    ],
)
def test_settings_that_contradict_sessions_are_refused(flags: tuple[str, ...], key: str, tmp_path: Path) -> None:
    """With the key, before anything is loaded."""
    result = run(tmp_path / "run", "--profile", "local-m3", "--sessions", "http", *flags, small=())
    assert result.status == 2
    assert key in result.err
