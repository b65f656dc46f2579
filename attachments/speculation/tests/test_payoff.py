"""Speculation turns itself off where it samples fewer tokens per second, and on again where it pays."""

from __future__ import annotations

from structlog.testing import capture_logs

from attachments.speculation.payoff import BASELINE_STEPS, MAX_WAIT_STEPS, TRIAL_STEPS, WAIT_STEPS, Payoff

ROUND = BASELINE_STEPS + TRIAL_STEPS


def run_steps(payoff: Payoff, steps: int, gain: float, *, rows: int = 8) -> int:
    """Observe steps; those with drafts sample `gain` times as many tokens per second. Return their number."""
    drafted = 0
    for _ in range(steps):
        speculates = payoff.speculates(rows)
        drafted += speculates
        payoff.observe(rows, 1.0, round(100 * gain) if speculates else 100, drafted=speculates)
    return drafted


def test_speculation_that_pays_stays_on() -> None:
    """Only the steps that measure plain decoding have no drafts, and nothing is logged."""
    payoff = Payoff(always=False)
    with capture_logs() as logs:
        assert run_steps(payoff, ROUND, 1.5) == TRIAL_STEPS
        assert run_steps(payoff, WAIT_STEPS, 1.5) == WAIT_STEPS
        assert run_steps(payoff, ROUND, 1.5) == TRIAL_STEPS
    assert logs == []


def test_speculation_that_does_not_pay_turns_off_and_tries_less_and_less_often() -> None:
    """The event has both rates and the batch sizes."""
    payoff = Payoff(always=False)
    with capture_logs() as logs:
        assert run_steps(payoff, ROUND, 0.8) == TRIAL_STEPS
        assert run_steps(payoff, 2 * WAIT_STEPS, 0.8) == 0
        assert run_steps(payoff, ROUND, 0.8) == TRIAL_STEPS
        assert run_steps(payoff, 4 * WAIT_STEPS, 0.8) == 0
        steps = 100 * MAX_WAIT_STEPS
        assert 90 * TRIAL_STEPS < run_steps(payoff, steps, 0.8) < 110 * TRIAL_STEPS
    assert [log["event"] for log in logs] == ["speculation_off"]
    assert (logs[0]["rows_from"], logs[0]["rows_to"]) == (8, 15)
    assert (logs[0]["tokens_per_second"], logs[0]["tokens_per_second_plain"]) == (80, 100)


def test_speculation_turns_on_again_only_for_a_clear_gain() -> None:
    """A gain between 1 and 1.1 keeps the present state."""
    payoff = Payoff(always=False)
    run_steps(payoff, ROUND, 0.8)
    with capture_logs() as logs:
        run_steps(payoff, 2 * WAIT_STEPS + ROUND, 1.05)
        assert not payoff.speculates(8)
        run_steps(payoff, 4 * WAIT_STEPS + ROUND, 1.2)
        assert payoff.speculates(8)
        run_steps(payoff, WAIT_STEPS + ROUND, 1.05)
        assert payoff.speculates(8)
    assert [log["event"] for log in logs] == ["speculation_on"]


def test_batch_sizes_are_judged_on_their_own() -> None:
    """Speculation pays in small batches and not in large ones."""
    payoff = Payoff(always=False)
    run_steps(payoff, ROUND, 2.0, rows=4)
    run_steps(payoff, ROUND, 0.5, rows=64)
    assert payoff.speculates(5)
    assert not payoff.speculates(100)


def test_steps_without_drafts_do_not_decide() -> None:
    """A prompt without history says nothing about speculation."""
    payoff = Payoff(always=False)
    run_steps(payoff, BASELINE_STEPS, 1.0)
    for _ in range(1000):
        payoff.observe(8, 5.0, 1, drafted=False)
    assert payoff.speculates(8)
    assert run_steps(payoff, TRIAL_STEPS, 1.5) == TRIAL_STEPS
    assert payoff.speculates(8)


def test_speculation_without_measurement_never_turns_off() -> None:
    """`always` makes steps independent of time."""
    payoff = Payoff(always=True)
    with capture_logs() as logs:
        assert run_steps(payoff, 1000, 0.1) == 1000
    assert logs == []
