"""Misbehaving custom components: a reward discards its groups, an inserted actor ends the run, and both are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.child_processes import descendants, wait_until_ended
from tests.e2e.custom_components import reward_behavior
from tests.e2e.pipeline_process import BATCH, UNEVALUATED, Run, RunResult, assert_recorded, lines, run
from training_run.supervision.watchdog import ENGINE_RESTARTS

MISBEHAVING_REWARD = """
extends = "local-m3"

[[rewards]]
name = "math_eval"
correct = true

[[rewards]]
name = "choice_correctness"
correct = true

[[rewards]]
name = "tests.e2e.custom_components:misbehaving_reward"
timeout_seconds = 0.3
"""

FAILING_STAGE = """
extends = "local-m3"

[[actors]]
name = "failing"
factory = "tests.e2e.custom_components:FailingStage"
mode = "insert"
at = "{queue}"
"""

ENGINE_BREAKER = """
extends = "local-m3"

[[actors]]
name = "engine_breaker"
factory = "tests.e2e.custom_components:EngineBreaker"
mode = "tap"
at = "scored"
"""

DETAILS = {"raises": "raised by the test", "nan": "returned nan", "hangs": "took longer than 0.3 s"}


def test_a_failing_reward_discards_only_its_own_groups(tmp_path: Path) -> None:
    """A reward raises, hangs or returns NaN. The run ends with status 0, and each such group has its reason."""
    (tmp_path / "misbehaving.toml").write_text(MISBEHAVING_REWARD)
    steps = 4
    flags = ("--profile", str(tmp_path / "misbehaving.toml"), "--steps", str(steps))
    result = run(tmp_path / "run", *flags, small=UNEVALUATED)
    assert result.status == 0, result
    accounting = result.accounting
    assert (accounting.prompted, accounting.carried_over) == (steps * BATCH, 0)
    assert_recorded(tmp_path / "run", accounting, steps=steps)
    groups = lines(tmp_path / "run" / "rollouts.jsonl")
    for group in groups:
        kind = reward_behavior(group["prompt"])
        if kind == "works":
            assert group["reason"] in (None, "zero_variance")
        else:
            assert group["reason"] == "reward_error"
            assert DETAILS[kind] in group["detail"]
    assert {reward_behavior(group["prompt"]) for group in groups} == {"works", *DETAILS}
    errors = sum(group["reason"] == "reward_error" for group in groups)
    assert f"reward_error {errors}" in result.out


def assert_failed_by_name(run_dir: Path, result: RunResult) -> None:
    """Check that the failing actor ended the run."""
    assert result.status == 1
    (line,) = result.err.splitlines()
    assert line.startswith("clotho: actor 'failing' failed: LookupError: raised by the test; ")
    (failure,) = (event for event in lines(run_dir / "log.jsonl") if event["event"] == "run_failed")
    assert 'raise LookupError("raised by the test")' in failure["exception"]


def test_a_failing_inserted_actor_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """Exit status 1, and one line with its name instead of those of its neighbours. The log has its traceback."""
    (tmp_path / "failing.toml").write_text(FAILING_STAGE.format(queue="scored"))
    result = run(tmp_path / "run", "--profile", str(tmp_path / "failing.toml"), "--steps", "4", small=UNEVALUATED)
    assert_failed_by_name(tmp_path / "run", result)


@pytest.mark.slow
def test_a_decode_engine_that_fails_too_often_ends_the_process(tmp_path: Path) -> None:
    """After its restarts: exit status 1, one line with its name, and no process below. No group is lost: the failed
    groups are discarded with the reason, and the resumed run ends every group exactly once.
    """
    run_dir = tmp_path / "run"
    (tmp_path / "breaker.toml").write_text(ENGINE_BREAKER)
    flags = ("--profile", str(tmp_path / "breaker.toml"), "--steps", "5000", "--checkpoint.interval", "1")
    with Run(run_dir, *flags) as running:
        running.wait_for("tokens/s")
        below = list(descendants(running.process.pid))
        result = running.finish()
    assert result.status == 1, result
    (line,) = result.err.splitlines()
    assert line.startswith("clotho: actor 'decode engine' failed: LookupError: raised by the test")
    assert wait_until_ended(below)
    failures = [event for event in lines(run_dir / "log.jsonl") if event["event"] == "actor_failed"]
    assert [event["actor"] for event in failures] == ["decode engine"] * ENGINE_RESTARTS.max_restarts
    newest = max((run_dir / "checkpoints").glob("step-*"))
    steps = -(-json.loads((newest / "state.json").read_text())["prompted"] // BATCH)
    resumed = run(run_dir, "--steps", str(steps), "--resume")
    assert resumed.status == 0, resumed
    assert_recorded(run_dir, resumed.accounting, steps=steps)


def test_groups_of_a_failed_generation_are_sampled_once_more(tmp_path: Path) -> None:
    """An actor behind the generator fails while the other groups of the batch are sampled. The resumed run samples
    the groups that had not ended, and every group ends exactly once.
    """
    (tmp_path / "failing.toml").write_text(FAILING_STAGE.format(queue="rollouts"))
    failed = run(tmp_path / "run", "--profile", str(tmp_path / "failing.toml"), "--steps", "2", small=UNEVALUATED)
    assert_failed_by_name(tmp_path / "run", failed)
    assert lines(tmp_path / "run" / "metrics.jsonl") == []
    result = run(tmp_path / "run", "--steps", "2", "--resume", small=UNEVALUATED)
    assert result.status == 0, result
    assert (result.accounting.prompted, result.accounting.carried_over) == (2 * BATCH, 0)
    assert_recorded(tmp_path / "run", result.accounting, steps=2)
    assert sorted(group["group_id"] for group in lines(tmp_path / "run" / "rollouts.jsonl")) == list(range(2 * BATCH))
