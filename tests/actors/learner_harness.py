"""A learner with queues on all its ends and a policy of few parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.learner import LearnerActor
from clotho.lanes.compute_thread import Compute
from clotho.training.update import PolicyLearner
from protocols.checkpoint import Part
from protocols.rollout import Discarded, GroupOutcome
from protocols.step import FirstBatch, GroupsEnded, LearnerReport, PolicyUpdated, StepReport
from tests.actors.actor_helpers import filled_queue, prompt, receive_all
from tests.learner_settings import learner_settings
from tests.training import policies_and_groups
from tests.training.policies_and_groups import BigramPolicy, scored_group
from training_run.groups.ledger import Ledger
from training_run.groups.progress import LearnerProgress
from training_run.supervision.hooks import UpdateHook
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue


def trainable_group(group_id: int, *, version: int = 0, logprob: float = -1.5) -> GroupOutcome:
    """Return a group with nonzero advantages. A NaN `logprob` makes its update non-finite."""
    return scored_group([[1, 2], [3, 4, group_id % 4]], [0.0, 1.0], group_id=group_id, version=version, logprob=logprob)


def discarded_group(group_id: int) -> Discarded:
    """Return a group that an earlier actor discarded."""
    return Discarded(prompt=prompt(group_id), reason="reward_error", detail="raised")


class LearnerHarness:
    """A learner of a small policy, with a reader on each outbox."""

    def __init__(
        self,
        compute: Compute,
        outcomes: Sequence[GroupOutcome],
        *,
        progress: LearnerProgress | None = None,
        hooks: Sequence[UpdateHook | Callable[[PolicyLearner], UpdateHook]] = (),
        parts: Callable[[], Mapping[str, Part[object]]] = dict,
        steps: int = 100,
        from_environments: bool = False,
        first_check_seconds: float = 0.0,
        lag: int = 0,
        scored: Queue[GroupOutcome] | None = None,
        **keys: Any,
    ) -> None:
        """hooks: some are functions of the policy learner that return one.

        scored: the queue of the groups; by default one that holds `outcomes` and has ended.
        """
        keys = {"batch_size": 2, "learning_rate": 1e-2, "schedule": "constant", **keys}
        self.policy = BigramPolicy()
        self.policy_learner = compute.learner.submit(
            lambda: policies_and_groups.learner(self.policy, measure_update_kl=True, **keys)
        ).result()
        self.ledger, self.progress = Ledger(), progress or LearnerProgress()
        self.replacements = Latest[int]("refills")
        self.replacements.put(0)
        self.logged = Latest[int]("recorded")
        self.logged.put(1000)
        self.scored = scored or filled_queue("scored", outcomes)
        self.causes: list[str] = []
        self.updates = [Queue[PolicyUpdated](f"updates.{name}", capacity=20) for name in ("one", "other")]
        self.reports = Queue[LearnerReport]("reports", capacity=20)
        self.update_inboxes = [learner.inbox() for learner in self.updates]
        self.report_inbox = self.reports.inbox()
        self.learner = LearnerActor(
            inbox=self.scored.inbox(),
            updates=[learner.outbox() for learner in self.updates],
            reports=self.reports.outbox(),
            compute=compute,
            policy_learner=self.policy_learner,
            settings=learner_settings(**keys),
            ledger=self.ledger,
            progress=self.progress,
            replacements=self.replacements,
            logged=self.logged,
            hooks=[hook if isinstance(hook, UpdateHook) else hook(self.policy_learner) for hook in hooks],
            parts=parts,
            steps=steps,
            synchronous=False,
            from_environments=from_environments,
            first_check_seconds=first_check_seconds,
            lag=lag,
            stop_sampling=self.causes.append,
        )

    async def run(self) -> list[StepReport]:
        """Run the learner to its end and return its step reports."""
        await self.learner.run()
        reports = await receive_all(self.report_inbox)
        self.ended_early = [report for report in reports if isinstance(report, GroupsEnded)]
        self.first_batches = [report for report in reports if isinstance(report, FirstBatch)]
        return [report for report in reports if isinstance(report, StepReport)]
