"""A learner between mailboxes, with a policy of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.learner import Learner, LearnerProgress
from clotho.config.schema import CollapseDetectionSection, ReplaySection
from clotho.config.sections_training import NoReplay
from clotho.monitoring.collapse_detection import CollapseMonitor
from clotho.runtime.compute_thread import ComputeExecutor
from clotho.runtime.latest import Latest
from clotho.runtime.queues import Queue
from clotho.training.ledger import Ledger
from clotho.training.replay import ReplayBuffer
from protocols.collapse import CollapseState
from protocols.rollout import Discarded, GroupOutcome
from protocols.step import GroupsEnded, PolicyUpdated, StepReport
from tests.actors.boxes import everything, filled, prompt
from tests.learner_settings import learner_settings
from tests.training import policies_and_groups
from tests.training.policies_and_groups import BigramPolicy, scored_group


def taught(group_id: int, *, version: int = 0, logprob: float = -1.5) -> GroupOutcome:
    """A group from which something can be learned; of a probability that is not a number, nothing can."""
    return scored_group([[1, 2], [3, 4, group_id % 4]], [0.0, 1.0], group_id=group_id, version=version, logprob=logprob)


def lost(group_id: int) -> Discarded:
    """A group that ended before."""
    return Discarded(prompt=prompt(group_id), reason="reward_error", detail="raised")


class Scene:
    """A learner of a policy of a few numbers, with a reader on each of its arrows."""

    def __init__(
        self,
        executor: ComputeExecutor,
        outcomes: Sequence[GroupOutcome],
        *,
        progress: LearnerProgress | None = None,
        replay: ReplaySection | None = None,
        alarms: CollapseDetectionSection | None = None,
        remembered: CollapseState | None = None,
        steps: int = 100,
        from_environments: bool = False,
        **keys: Any,
    ) -> None:
        alarms = alarms or CollapseDetectionSection(on_collapse="off")
        keys = {"batch_size": 2, "learning_rate": 1e-2, "schedule": "constant", **keys}
        self.policy = BigramPolicy()
        self.learned = executor.submit(
            lambda: policies_and_groups.learner(self.policy, rollback_window=1, measure_update_kl=True, **keys)
        ).result()
        self.ledger, self.progress = Ledger(), progress or LearnerProgress()
        self.replay = ReplayBuffer(replay or NoReplay(), seed=0)
        self.refills = Latest[int]("refills")
        self.refills.put(0)
        self.recorded = Latest[int]("recorded")
        self.recorded.put(1000)
        self.scored = filled("scored", outcomes)
        self.updates = [Queue[PolicyUpdated](f"updates.{name}", capacity=20) for name in ("one", "other")]
        self.reports = Queue[StepReport | GroupsEnded]("reports", capacity=20)
        self.told = [box.inbox() for box in self.updates]
        self.reported = self.reports.inbox()
        self.box = Learner(
            inbox=self.scored.inbox(),
            updates=[box.outbox() for box in self.updates],
            reports=self.reports.outbox(),
            executor=executor,
            policy_learner=self.learned,
            settings=learner_settings(**keys),
            ledger=self.ledger,
            progress=self.progress,
            replacements=self.refills,
            logged=self.recorded,
            replay=self.replay,
            collapse=CollapseMonitor(alarms, state=remembered or CollapseState(), rollbacks=0),
            steps=steps,
            synchronous=False,
            from_environments=from_environments,
        )

    async def run(self) -> list[StepReport]:
        """Run it to its end; its reports, one a batch."""
        await self.box.run()
        told = await everything(self.reported)
        self.ended_early = [report for report in told if isinstance(report, GroupsEnded)]
        return [report for report in told if isinstance(report, StepReport)]
