"""The learner after the verdicts of hooks: rollback, stop and findings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from clotho.lanes.compute_thread import Compute
from clotho.training.update import PolicyLearner
from protocols.errors import CollapseError, DivergenceError
from protocols.finding import CHECK, Finding
from protocols.step import StepReport
from tests.actors.actor_helpers import receive_all
from tests.actors.learner_harness import LearnerHarness, trainable_group
from tests.training import policies_and_groups
from training_run.supervision.hooks import UpdateHook, Verdict

FOUND = Finding(name="reward_drop", severity="warning", fact="f", consequence="c", advice="a", remedy=CHECK)


class Judge(UpdateHook):
    """Gives a verdict on the first batch, and counts the rollbacks that it is told of."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict: Verdict | None = verdict
        self.rollbacks = 0

    def assess(self, report: StepReport) -> Verdict:
        verdict, self.verdict = self.verdict, None
        return verdict or Verdict()

    def rolled_back(self) -> None:
        self.rollbacks += 1


def to_the_start(hooks: list[Judge]) -> Callable[[PolicyLearner], UpdateHook]:
    """Return a hook that goes back to the initial policy after the first batch, with a third of the rate."""

    def made(learner: PolicyLearner) -> UpdateHook:
        hooks.append(Judge(Verdict(findings=(FOUND,), back_to=learner.snapshot(), rate=1 / 3)))
        return hooks[-1]

    return made


async def test_a_rollback_publishes_the_restored_weights_under_a_new_version(compute: Compute) -> None:
    """No version number is used twice.

    Groups of the policy that is left are discarded, every hook hears of it, and the group accounting continues.
    """
    outcomes = [trainable_group(0), trainable_group(1), trainable_group(2, version=1), trainable_group(3, version=2)]
    other, hooks = Judge(Verdict()), list[Judge]()
    harness = LearnerHarness(compute, outcomes, hooks=[to_the_start(hooks), other])
    initial = harness.policy.trainable()
    first, second = await harness.run()
    update = await harness.update_inboxes[0].receive()
    assert (first.version, first.rolled_back, len(first.trained)) == (2, True, 2)
    assert first.collapse_findings == (FOUND,)
    assert (second.rolled_back, second.collapse_findings) == (False, ())
    assert policies_and_groups.same_bits(update.parameters, initial)
    assert [hook.rollbacks for hook in (*hooks, other)] == [1, 1]
    assert [drop.reason for drop in second.discarded] == ["stale"]
    assert harness.ledger.balance(prompted=4, carried_over=0).holds
    assert second.update
    assert second.update.learning_rate == pytest.approx(1e-2 / 3)


async def test_an_error_of_a_verdict_ends_the_run(compute: Compute) -> None:
    """The update is sent first, for the last checkpoint."""
    judge = Judge(Verdict(error=CollapseError("collapsed")))
    harness = LearnerHarness(compute, [trainable_group(group_id) for group_id in range(4)], hooks=[judge])
    with pytest.raises(CollapseError, match="collapsed"):
        await harness.learner.run()
    assert len(await receive_all(harness.update_inboxes[0])) == 1


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"hooks": [Judge(Verdict(error=CollapseError("collapsed")))]}, CollapseError),
        ({"outcome": trainable_group(0, logprob=math.nan), "max_bad_steps": 1}, DivergenceError),
    ],
)
async def test_a_failing_run_waits_for_the_log_of_its_last_batch(
    compute: Compute, keys: dict[str, Any], error: type[Exception]
) -> None:
    """The failure would otherwise cancel the monitor before the line that shows the reason."""
    keys = {"outcome": trainable_group(0), **keys}
    harness = LearnerHarness(compute, [keys.pop("outcome")], batch_size=1, **keys)
    harness.logged.put(0)
    ended = anyio.Event()

    async def run() -> None:
        with pytest.raises(error):
            await harness.learner.run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await harness.report_inbox.receive()
        await anyio.wait_all_tasks_blocked()
        assert not ended.is_set()
        harness.logged.put(1)
    assert ended.is_set()


async def test_a_rollback_resets_the_count_of_bad_steps(compute: Compute) -> None:
    """Non-finite updates of the policy that is left do not end the restored run."""
    outcomes = [trainable_group(0, logprob=math.nan), trainable_group(1, version=1)]
    harness = LearnerHarness(compute, outcomes, hooks=[to_the_start([])], batch_size=1, max_bad_steps=1)
    first, second = await harness.run()
    assert (first.rolled_back, first.update and first.update.update_applied) == (True, False)
    assert (second.version, len(second.trained), harness.progress.bad_steps) == (2, 1, 0)
