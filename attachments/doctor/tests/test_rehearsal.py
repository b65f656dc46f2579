"""What a rehearsal measures becomes findings and a forecast."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from attachments.doctor.rehearsal import Rehearsed, forecast, parity_findings, rehearsed_steps, update_findings
from tests.training_run.built_context import tiny_profile
from tests.training_run.simulated_run import METRICS
from training_run.parity_check import ParityReport

REHEARSED = Rehearsed(
    completion_tokens=50.0, decode_tokens_per_second=100.0, update_seconds=2.0, longest_turn_seconds=0.25
)


def test_the_forecast_adds_decoding_updates_and_evaluations(tmp_path: Path) -> None:
    """Ten steps of 2 x 2 completions of 50 tokens, and 20 held-out problems before, after and every 4 steps."""
    profile = tiny_profile(tmp_path, eval={"type": "heldout", "interval": 4, "problems_between": 10})
    found = forecast(profile, REHEARSED, heldout=20)
    assert found.seconds_per_step == pytest.approx(2.0 + 2.0)
    assert found.evaluation_seconds == pytest.approx((20 + 20 + 2 * 10) * 0.5)
    assert found.seconds == pytest.approx(10 * 4.0 + 30.0)
    sampled = {"type": "heldout", "interval": 4, "problems_between": 10, "samples": 3}
    assert forecast(tiny_profile(tmp_path, eval=sampled), REHEARSED, heldout=20).evaluation_seconds == 4 * 30.0
    assert found.seconds_least == pytest.approx(10 * 2.0 + 30.0)
    assert found.seconds_most == found.seconds
    without = forecast(tiny_profile(tmp_path, eval="off"), REHEARSED, heldout=20)
    assert without.seconds == pytest.approx(10 * 4.0)


def test_dynamic_sampling_makes_a_run_longer_than_the_forecast(tmp_path: Path) -> None:
    """At most three batches are decoded per update; no update is left out."""
    objective = {"type": "dapo", "dynamic_sampling_max_ratio": 3.0}
    profile = tiny_profile(tmp_path, eval="off", learner={"objective": objective})
    found = forecast(profile, REHEARSED, heldout=20)
    assert found.seconds == found.seconds_least == pytest.approx(10 * 4.0)
    assert found.seconds_most == pytest.approx(10 * (3 * 2.0 + 2.0))


def test_the_first_step_and_the_first_at_the_full_learning_rate_are_rehearsed(tmp_path: Path) -> None:
    """As far as the run has them."""
    at_once = {"schedule": {"type": "constant", "warmup_steps": 0}}
    assert rehearsed_steps(tiny_profile(tmp_path)) == (0, 5)
    assert rehearsed_steps(tiny_profile(tmp_path, learner=at_once)) == (0, 1)
    assert rehearsed_steps(tiny_profile(tmp_path, steps=4)) == (0,)


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        ((0.01, 0.02), []), ((None, None), []), ((0.35, 0.09), []), ((0.05, 0.4), []),
        ((0.15, 0.2), ["update_too_large"]), ((0.7, 0.01), ["update_too_large"]), ((0.7,), ["update_too_large"]),
        ((0.2,), []), ((0.01, float("nan")), ["update_too_large"]), ((), []),
    ],
    ids=[
        "healthy", "not measured", "large first", "large second", "both large", "certain", "one, certain", "one", "NaN",
        "none",
    ],
)  # fmt: skip
def test_rehearsed_updates_that_move_the_policy_far_are_a_finding(
    moved: tuple[float | None, ...], expected: list[str], tmp_path: Path
) -> None:
    """As in the collapse detection: two updates above its limit, 0.1, or one above five times it.

    The advice is a lower learning rate.
    """
    rehearsed = [replace(METRICS, update_kl=kl, learning_rate=0.5) for kl in moved]
    found = list(update_findings(rehearsed, tiny_profile(tmp_path)))
    assert [finding.name for finding in found] == expected
    assert all("--learner.optimizer.learning-rate 0.05" in finding.advice for finding in found)


def test_the_limit_of_a_rehearsed_update_is_that_of_the_profile(tmp_path: Path) -> None:
    """A profile whose healthy updates are large raises it."""
    profile = tiny_profile(tmp_path, collapse_detection={"type": "warn", "update_kl_high": 0.5})
    assert list(update_findings([replace(METRICS, update_kl=0.4)] * 2, profile)) == []


def test_an_update_that_is_not_finite_is_a_finding(tmp_path: Path) -> None:
    """The advice names the type of computation."""
    (finding,) = update_findings([METRICS, None], tiny_profile(tmp_path))
    assert finding.name == "update_not_finite"
    assert "model.dtype" in finding.advice


@pytest.mark.parametrize(("kl", "count"), [(1e-9, 0), (1.0, 1), (float("nan"), 1)])
def test_different_log_probabilities_are_a_finding(kl: float, count: int, tmp_path: Path) -> None:
    """NaN exceeds every limit."""
    report = ParityReport(rows=2, tokens=8, mean_kl=kl, max_difference=0.0, served_kl=0.0)
    found = list(parity_findings(report, tiny_profile(tmp_path), "float32"))
    assert [finding.name for finding in found] == ["parity_differs"] * count
