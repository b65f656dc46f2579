"""Runs with non-default objectives, sampling parameters, optimizers and state."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from tests.e2e import custom_objective
from tests.e2e.pipeline_process import BATCH, UNEVALUATED, Run, assert_recorded, lines, metrics, run

EVERYTHING = """
extends = "local-m3"
async = false
steps = 8

[policy]
method = "dora"

[learner]
update_epochs = 2
num_minibatches = 2
entropy_bonus = { type = "adaptive", target = 0.5 }

[learner.objective]
type = "dapo"
ratio_reference = "batch_start"
importance_correction = "mask"
overlong_penalty = { type = "linear", buffer = 40 }

[learner.optimizer]
type = "muon"
learning_rate = 1e-3

[learner.kl_penalty]
type = "loss"
coef = 0.02
control = { type = "adaptive", target = 0.01 }
reference = { type = "average", decay = 0.9 }

[replay]
type = "buffer"
capacity = 6
groups = 2
sampling = "weighted"

[collapse_detection]
type = "rollback"
window = 2

[checkpoint]
interval = 1

[[actors]]
name = "telling"
factory = "tests.e2e.custom_components:StepPrinter"
mode = "tap"
at = "reports"
"""
"""Every state that learning carries from update to update: controllers, reference, replay buffer, good policies."""

TRUNCATED = """
extends = "local-m3"

[sampling]
temperature = 0.8
top_k = 20
top_p = 0.9
min_p = 0.02

[learner]
objective = "tests.e2e.custom_objective:importance_weighted"
layout = "packed"
"""


RUINOUS = (
    "--policy.method", "full", "--learner.optimizer.learning-rate", "5e-2", "--learner.schedule.warmup-steps", "0",
)  # fmt: skip


@pytest.mark.slow
def test_the_complete_learner_state_survives_a_kill(tmp_path: Path) -> None:
    """With dynamic sampling, replay, controllers, a moving reference policy and rollback the adapter of the resumed
    run is identical.
    """
    profile = tmp_path / "everything.toml"
    profile.write_text(EVERYTHING)
    flags = ("--profile", str(profile))
    whole = run(tmp_path / "whole", *flags)
    assert whole.status == 0, whole
    with Run(tmp_path / "run", *flags) as running:
        for _ in range(4):
            running.wait_for("step reported")
        assert running.kill(after_seconds=0.3)
    result = run(tmp_path / "run", *flags, "--resume")
    assert result.status == 0, result
    assert result.accounting == whole.accounting
    assert result.accounting.carried_over == 0
    adapters = [tmp_path / name / "adapters" / "adapters.safetensors" for name in ("run", "whole")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_dynamic_sampling_fills_every_batch(tmp_path: Path) -> None:
    """Zero-variance groups are replaced, so every update has batch_size groups."""
    result = run(tmp_path / "run", "--steps", "2", "--learner.objective", "dapo", small=UNEVALUATED)
    assert result.status == 0, result
    assert result.accounting.trained == 2 * BATCH
    assert result.accounting.carried_over == 0
    assert all(line["groups/trained"] == BATCH for line in metrics(tmp_path / "run"))


LAGGED = (
    "--async", "false", "--rollouts.lag", "3", "--steps", "5",
    "--learner.objective", "reinforce", "--learner.objective.importance-correction", "truncate_sequence",
    "--learner.objective.advantage", "optimal_baseline", "--learner.step-scale", "ess",
)  # fmt: skip


def test_with_a_lag_every_group_is_as_old_as_the_lag(tmp_path: Path) -> None:
    """Its age in versions is the number of updates in as many batches. No group is lost at the end of the run, and the
    learning rate follows the effective sample size.
    """
    result = run(tmp_path / "run", *LAGGED, small=UNEVALUATED)
    assert result.status == 0, result
    assert (result.accounting.prompted, result.accounting.carried_over) == (5 * BATCH, 0)
    recorded = metrics(tmp_path / "run")
    versions = [0, *(line["policy_version"] for line in recorded)]
    ages = [versions[step] - versions[max(0, step - 3)] for step in range(5)]
    assert max(ages) == 3
    for age, line in zip(ages, recorded, strict=True):
        trained = line["groups/trained"]
        assert line["staleness/histogram"] == ({str(age): trained} if trained else {})
    scales = [line["step_scale"] for line in recorded if line["update_applied"]]
    assert scales[0] == pytest.approx(1.0, abs=1e-3)
    assert 0.0 < min(scales) < 0.999


@pytest.mark.slow
def test_a_run_with_a_lag_is_reproducible_bit_for_bit(tmp_path: Path) -> None:
    """Neither the batches of the engine nor the order of updates depend on timing."""
    for name in ("first", "second"):
        assert run(tmp_path / name, *LAGGED, small=UNEVALUATED).status == 0
    adapters = [tmp_path / name / "adapters" / "adapters.safetensors" for name in ("first", "second")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_a_filtered_sampling_distribution_is_trained_on_correctly(tmp_path: Path) -> None:
    """With top-k, top-p and min-p, sampler and learner agree on the on-policy tokens."""
    profile = tmp_path / "truncated.toml"
    profile.write_text(TRUNCATED)
    result = run(tmp_path / "run", "--profile", str(profile), "--steps", "1", small=UNEVALUATED)
    assert result.status == 0, result
    [recorded] = metrics(tmp_path / "run")
    assert recorded["mismatch_kl"] < 1e-5
    assert 0.99 < recorded["ess"] <= 1.0 + 1e-6
    assert math.isfinite(recorded["loss"])


def test_non_finite_updates_end_the_run_with_its_last_good_checkpoint(tmp_path: Path) -> None:
    """The loss becomes NaN. The run skips two updates and ends with status 1; the newest checkpoint has the weights
    before them, and the run can be resumed from it.
    """
    run_dir = tmp_path / "run"
    objective = "tests.e2e.custom_objective:nan_after_two_calls"
    flags = ("--learner.objective", objective, "--learner.max-bad-steps", "2", "--checkpoint.interval", "1")
    custom_objective.CALLS = itertools.count(1)
    result = run(run_dir, *flags, "--steps", "12", small=UNEVALUATED)
    assert result.status == 1, result
    recorded = metrics(run_dir)
    good, bad = recorded[:-2], recorded[-2:]
    assert good
    assert [line["update_applied"] for line in recorded] == [True] * len(good) + [False, False]
    assert {line["weights_hash"] for line in bad} == {good[-1]["weights_hash"]}
    assert all(set(line["groups/discarded_by_reason"]) <= {"not_finite", "zero_variance"} for line in bad)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    assert json.loads((newest / "state.json").read_text())["fingerprint"] == good[-1]["weights_hash"]
    custom_objective.CALLS = itertools.count(1)
    again = run(run_dir, *flags, "--resume", "--steps", str(len(recorded)), small=UNEVALUATED)
    assert again.status == 0, again
    assert_recorded(run_dir, again.accounting, steps=len(recorded))


def test_a_collapsed_policy_is_rolled_back(tmp_path: Path) -> None:
    """An excessive learning rate triggers collapse detection. The final accuracy is close to the initial one."""
    flags: tuple[str, ...] = ("--collapse-detection", "rollback", "--collapse-detection.window", "2")
    flags += ("--collapse-detection.rollback-rate", "0.001", "--steps", "6", "--async", "false")
    result = run(tmp_path / "run", *RUINOUS, *flags)
    assert result.status == 0, result
    recorded = metrics(tmp_path / "run")
    assert any(line["findings"] for line in recorded)
    measured = [line["accuracy"] for line in lines(tmp_path / "run" / "evaluations.jsonl")]
    assert measured[-1] > measured[0] / 2
    versions = [line["policy_version"] for line in recorded]
    assert versions == sorted(versions)


def test_a_run_stops_at_the_first_collapse(tmp_path: Path) -> None:
    """One line has the sign, the exit status is 1, and the last batch is in the logs."""
    flags = ("--collapse-detection", "stop", "--collapse-detection.window", "2")
    result = run(tmp_path / "run", *RUINOUS, *flags, "--steps", "12", small=UNEVALUATED)
    assert result.status == 1, result
    assert "collapse_detection" in result.err
    recorded = metrics(tmp_path / "run")
    assert [bool(line["findings"]) for line in recorded][-1:] == [True]
    assert f"at step {recorded[-1]['step']}:" in result.err
