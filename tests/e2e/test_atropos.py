"""Atropos environments train the policy through the real API server, and each process may be killed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from attachments.atropos.tests.atroposlib_python import python_with_atropos
from tests.e2e.child_processes import descendants, find, kill, wait_until_ended
from tests.e2e.pipeline_process import BATCH, PRINTED_STEPS, Run, RunResult, lines, run

pytestmark = pytest.mark.needs_extra("atroposlib")

TELLING = f'extends = "atropos-local"\n{PRINTED_STEPS}'

OF_ENVIRONMENT = re.compile(r"arithmetic: received (\d+) = trained (\d+) \+ discarded (\d+) \+ carried over (\d+)")


@pytest.fixture
def atropos() -> tuple[str, str]:
    """Return the flag that names the Python interpreter of Atropos."""
    return "--atropos.python", python_with_atropos()


def environment_accounting(result: RunResult) -> tuple[int, int, int, int]:
    """Return received, trained, discarded and carried over groups of the one environment, whose balance holds."""
    (line,) = OF_ENVIRONMENT.findall(result.out)
    received, trained, discarded, carried_over = map(int, line)
    assert received == trained + discarded + carried_over
    return received, trained, discarded, carried_over


@pytest.mark.slow
def test_an_environment_raises_the_accuracy(tmp_path: Path, atropos: tuple[str, str]) -> None:
    """Ten steps of the shipped profile."""
    small = ("--server.port", "0", "--eval.problems", "128")
    with Run(tmp_path / "run", "--profile", "atropos-local", *atropos, "--steps", "10", small=small) as running:
        result = running.finish()
    assert result.status == 0, result
    evaluations = lines(tmp_path / "run" / "evaluations.jsonl")
    before, after = [line["accuracy"] for line in evaluations if line["problems"] == 128]
    assert after > before + 0.1


def test_an_environment_trains_the_policy(tmp_path: Path, atropos: tuple[str, str]) -> None:
    """A short run of the shipped profile: rollout log-probabilities are used, and no process remains."""
    small = ("--server.port", "0", "--learner.batch-size", str(BATCH), "--eval", "off")
    with Run(tmp_path / "run", "--profile", "atropos-local", *atropos, "--steps", "2", small=small) as running:
        running.wait_for("step 1/2")
        started = descendants(running.process.pid)
        assert {part for part in ("run_api", "arithmetic.py") for command in started.values() if part in command} == {
            "run_api",
            "arithmetic.py",
        }
        result = running.finish()
    assert result.status == 0, result
    assert wait_until_ended(list(started))
    received, trained, _, carried_over = environment_accounting(result)
    assert (received, trained, carried_over) == (result.accounting.prompted, 2 * BATCH, 0)
    recorded = lines(tmp_path / "run" / "metrics.jsonl")
    assert any(line["update_applied"] for line in recorded)
    errors = [line["environments"]["arithmetic"]["logprob_error_max"] for line in recorded if "environments" in line]
    assert max(errors) < 1e-5
    assert {group["environment"] for group in lines(tmp_path / "run" / "rollouts.jsonl")} == {"arithmetic"}


@pytest.mark.slow
def test_a_signal_drains_a_run_with_groups_in_flight(tmp_path: Path, atropos: tuple[str, str]) -> None:
    """SIGTERM while the environment works: exit status 0, received groups are trained on or discarded, and no process
    remains.
    """
    profile, run_dir = tmp_path / "telling.toml", tmp_path / "run"
    profile.write_text(TELLING)
    with Run(run_dir, "--profile", str(profile), *atropos, "--steps", "5000") as running:
        running.wait_for("step reported")
        below = list(descendants(running.process.pid))
        running.send(signal.SIGTERM)
        result = running.finish()
    assert (result.status, result.err) == (0, ""), result
    assert wait_until_ended(below)
    received, trained, discarded, _ = environment_accounting(result)
    assert received == result.accounting.prompted
    groups = lines(run_dir / "rollouts.jsonl")
    assert len({group["group_id"] for group in groups}) == len(groups) == trained + discarded
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")][-1] >= 1


@pytest.mark.slow
def test_killed_processes_restart_and_no_group_is_trained_on_twice(tmp_path: Path, atropos: tuple[str, str]) -> None:
    """API server and environment are restarted and training continues. A killed trainer resumes."""
    profile, run_dir = tmp_path / "telling.toml", tmp_path / "run"
    profile.write_text(TELLING)
    arguments = ("--profile", str(profile), *atropos, "--steps", "9", "--checkpoint.interval", "1")
    with Run(run_dir, *arguments) as running:
        for victim in ("run_api", "arithmetic.py"):
            running.wait_for("step reported")
            kill(find(running.process.pid, victim))
            assert "process_restarts" in running.wait_for("was ended by SIGKILL")
            running.wait_for("step reported")
        below = list(descendants(running.process.pid))
        assert running.kill(after_seconds=0.0)
    assert wait_until_ended(below), "child processes end with the trainer"
    result = run(run_dir, *arguments, "--resume")
    assert result.status == 0, result
    groups = lines(run_dir / "rollouts.jsonl")
    trained = [group["group_id"] for group in groups if group["outcome"] == "trained"]
    assert len(trained) == 9 * BATCH
    assert len({group["group_id"] for group in groups}) == len(groups) == result.accounting.prompted
    environment_accounting(result)
