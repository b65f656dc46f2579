"""A custom actor that does not send groups on: the run names it and the groups, counts them, and ends with status 1."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pipeline_process import Run, RunResult, lines, run
from tests.training_run.built_context import tiny_profile
from training_run.profile.load import write_profile


def profile(directory: Path, queue: str, *, stage: str = "DroppingStage", **sections: Any) -> tuple[str, ...]:
    """Flags for a profile of a tiny model with an actor in a queue, and short time limits."""
    stage = f"tests.e2e.custom_components:{stage}"
    limits = {"watchdog_seconds": 2.0, "drain_seconds": 1.0}
    made = tiny_profile(
        directory,
        eval="off",
        actors=[{"name": "mine", "factory": stage, "mode": "insert", "at": queue}],
        rewards=[{"name": "tests.e2e.custom_components:varied_reward", "run_in": "thread"}],
        sampling={"group_size": 4, "temperature": 2.0},
        monitor=limits,
        **sections,
    )
    write_profile(made, directory / "mine.toml")
    return ("--profile", str(directory / "mine.toml"))


def assert_ended_early(run_dir: Path, result: RunResult) -> None:
    """Exit status 1, with a checkpoint of the last step and the adapter. Every group is counted."""
    assert result.status == 1, result
    steps = [line["step"] for line in lines(run_dir / "metrics.jsonl")]
    assert (run_dir / "checkpoints" / f"step-{steps[-1]:06d}" / "MANIFEST.json").is_file()
    assert (run_dir / "adapters" / "adapters.safetensors").is_file()
    assert result.accounting.trained > 0


@pytest.mark.parametrize(("asynchronous", "queue"), [(True, "rollouts"), (True, "scored"), (False, "prompts")])
def test_a_group_that_an_actor_does_not_send_on_is_lost_by_name(tmp_path: Path, asynchronous: bool, queue: str) -> None:
    """It is one of the discarded groups. A synchronous run, whose batch waits for it, ends after this batch."""
    sections: dict[str, Any] = {"steps": 3, "async": asynchronous}
    flags = profile(tmp_path, queue, **sections)
    result = run(tmp_path / "run", *flags, small=("--model.dtype", "float32"))
    assert_ended_early(tmp_path / "run", result)
    (finding,) = (line for line in lines(tmp_path / "run" / "log.jsonl") if line.get("finding") == "groups_lost")
    (lost,) = (line for line in lines(tmp_path / "run" / "rollouts.jsonl") if line["reason"] == "lost")
    assert f"mine (insert at {queue}): groups {lost['group_id']}" in finding["fact"]
    assert finding["command"].endswith("--resume")
    assert result.accounting.carried_over == 0
    assert "groups_lost" in result.out + result.err


def test_a_drain_without_progress_ends_at_its_time_limit(tmp_path: Path) -> None:
    """The actor does not wait for its next message. The run says what has not ended; the groups are carried over."""
    flags = profile(tmp_path, "scored", stage="StuckStage")
    with Run(tmp_path / "run", *flags, small=("--model.dtype", "float32")) as running:
        metrics = tmp_path / "run" / "metrics.jsonl"
        running.wait_until(lambda: metrics.is_file() and bool(lines(metrics)))
        running.send(signal.SIGTERM)
        result = running.finish()
    assert_ended_early(tmp_path / "run", result)
    (end,) = (line for line in lines(tmp_path / "run" / "log.jsonl") if line["event"] == "run_ends_early")
    assert "monitor.drain_seconds" in end["cause"]
    assert end["cause"].rpartition(": ")[2].startswith("mine")
    assert result.accounting.carried_over > 0
