"""Prompter, generator and learner in their circle: batches are refilled, nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import structlog

from clotho.lanes.compute_thread import Compute
from tests.actors.actor_helpers import compute_thread
from tests.training_run.simulated_run import SimulatedRun, SimulationSettings, random_groups, report_groups


@pytest.fixture(scope="module")
def compute() -> Iterator[Compute]:
    """A compute thread."""
    with compute_thread() as running:
        yield running


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("seed", range(8))
async def test_batches_are_full_or_at_their_limit_and_every_group_ends_once(
    compute: Compute, seed: int, ahead: int
) -> None:
    """asked - refilled = steps * batch_size, whoever loses how many; the run ends with nothing in flight."""
    chance = random.Random(seed)
    settings = SimulationSettings(
        zero_variance=random_groups(chance.random(), seed),
        discarded_early=random_groups(chance.random() / 2, seed + 99),
        ahead=ahead,
        batch_size=chance.randint(1, 4),
        steps=6,
    )
    simulated = SimulatedRun(compute, settings)
    reports = await simulated.run()
    prompted, size = simulated.prompter.prompted_until, settings.batch_size
    assert len(reports) == settings.steps
    assert simulated.ended() == list(range(prompted))
    assert prompted - simulated.replacements.value == settings.steps * size
    assert sum(report.replaced for report in reports) == simulated.replacements.value
    for report in reports:
        assert len(report_groups(report)) == size + report.replaced <= 4 * size
        assert len(report.trained) == size or len(report_groups(report)) == 4 * size
    assert simulated.ledger.balance(prompted=prompted, carried_over=0).holds


async def test_groups_that_come_too_late_are_replaced_too(compute: Compute) -> None:
    """They are counted as stale, beside the batch they would have been in."""
    settings = SimulationSettings(zero_variance=lambda group_id: False, ahead=3, steps=6)
    simulated = SimulatedRun(compute, settings)
    reports = await simulated.run()
    reasons = {drop.reason for report in reports for drop in report.discarded}
    assert (reasons, [len(report.trained) for report in reports]) == ({"stale"}, [3] * 6)
    assert all(age <= 1 for report in reports for age in report.staleness)


async def test_without_dynamic_sampling_nothing_is_replaced(compute: Compute) -> None:
    """A batch is so many groups, however they ended."""
    simulated = SimulatedRun(compute, SimulationSettings(zero_variance=random_groups(0.5), dynamic=False, steps=4))
    reports = await simulated.run()
    assert [len(report_groups(report)) for report in reports] == [3] * 4
    assert simulated.ended() == list(range(12))
    assert {report.replaced for report in reports} == {0}


async def test_synchronous_refills_come_in_rounds(compute: Compute) -> None:
    """What the engine sees is a function of who is lost alone: the batch, then all that must be replaced, together."""
    zero_variance = {0, 2, 3, 7}
    simulated = SimulatedRun(compute, SimulationSettings(zero_variance=zero_variance.__contains__, steps=3))
    await simulated.run()
    assert simulated.sampler.submissions == [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9], [10, 11, 12]]


async def test_a_batch_at_its_limit_is_taken_as_it_stands_with_a_warning(compute: Compute) -> None:
    """And one of nothing at all is a step without update."""
    simulated = SimulatedRun(
        compute, SimulationSettings(zero_variance=lambda group_id: group_id < 8 or group_id == 9, limit=2.0, steps=3)
    )
    with structlog.testing.capture_logs() as logs:
        reports = await simulated.run()
    assert [sorted(report_groups(report)) for report in reports] == [[*range(6)], [*range(6, 12)], [12, 13, 14]]
    assert [len(report.trained) for report in reports] == [0, 3, 3]
    assert [(report.version, report.update is None) for report in reports] == [(0, True), (1, False), (2, False)]
    assert [(line["prompted"], line["trainable"]) for line in logs if line["log_level"] == "warning"] == [(6, 0)]


@pytest.mark.parametrize("seed", range(4))
async def test_a_synchronous_run_resumed_from_any_batch_repeats_the_rest(compute: Compute, seed: int) -> None:
    """The same groups in the same calls to the engine, whatever had been asked when it was killed."""
    settings = SimulationSettings(zero_variance=random_groups(0.5, seed), discarded_early=random_groups(0.2, seed + 99))
    whole = SimulatedRun(compute, settings)
    reports = await whole.run()
    for after in whole.updates:
        resumed = SimulatedRun(compute, settings, after=after, prompted_until=after.ledger.all_ended_below + 2)
        again = await resumed.run()
        assert [report_groups(report) for report in again] == [report_groups(r) for r in reports[after.report.step :]]
        assert (
            resumed.sampler.submissions == whole.sampler.submissions[-len(resumed.sampler.submissions) :] or not again
        )
        assert resumed.replacements.value == whole.replacements.value


@pytest.mark.parametrize("seed", range(4))
async def test_an_asynchronous_run_resumed_from_any_batch_ends_in_balance(compute: Compute, seed: int) -> None:
    """Groups that were in flight are asked again; those no longer needed are carried over, and counted so."""
    settings = SimulationSettings(zero_variance=random_groups(0.5, seed), ahead=2)
    whole = SimulatedRun(compute, settings)
    prompted: dict[int, int] = {}
    await whole.run(lambda update: prompted.update({update.report.step: whole.prompter.prompted_until}))
    for after in whole.updates:
        resumed = SimulatedRun(compute, settings, after=after, prompted_until=prompted[after.report.step])
        again = await resumed.run()
        assert len(again) == settings.steps - after.report.step
        until, reached = resumed.prompter.prompted_until, resumed.prompter.sent_until
        carried = sum(group_id >= reached for group_id in resumed.ledger.unended(until))
        assert resumed.ledger.balance(prompted=until, carried_over=carried).holds
        assert resumed.ledger.ended - resumed.replacements.value == settings.steps * settings.batch_size


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("step", range(1, 6))
async def test_drained_while_it_refills_a_run_ends_with_what_it_asked(compute: Compute, step: int, ahead: int) -> None:
    """The last batch may be smaller; every group that was asked has ended."""
    simulated = SimulatedRun(
        compute,
        SimulationSettings(zero_variance=random_groups(0.5), discarded_early=random_groups(0.2, 99), ahead=ahead),
    )
    reports = await simulated.run(lambda update: simulated.prompter.drain() if update.report.step == step else None)
    assert step <= len(reports) <= 5
    assert simulated.ended() == list(range(simulated.prompter.prompted_until))
    assert simulated.ledger.balance(prompted=simulated.prompter.prompted_until, carried_over=0).holds
    for report in reports[:-1]:
        assert len(report.trained) == 3 or len(report_groups(report)) == 12


async def test_a_run_that_had_taken_all_its_steps_asks_nothing(compute: Compute) -> None:
    """It ends at once."""
    whole = SimulatedRun(compute, SimulationSettings(zero_variance=random_groups(0.3)))
    await whole.run()
    again = SimulatedRun(
        compute,
        SimulationSettings(zero_variance=random_groups(0.3)),
        after=whole.updates[-1],
        prompted_until=whole.prompter.prompted_until,
    )
    assert await again.run() == []
    assert again.ledger.balance(prompted=again.prompter.prompted_until, carried_over=0).holds
