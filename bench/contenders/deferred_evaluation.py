"""An evaluator that evaluates every policy version after training, so that evaluation does not slow training."""

from __future__ import annotations

import anyio
import structlog
from anyio.abc import TaskStatus

from actors.evaluator import Evaluator, Pinned
from protocols.evaluation import EvalReport
from protocols.queues import Inbox, Outbox
from protocols.step import PolicyUpdated
from training_run.supervision.custom_actors import Services

EVALUATED = "version_evaluated"
"""Log event of one evaluated version: its step and accuracy."""

UPDATED = "version_published"
"""Log event of a new version, logged immediately: its step."""

log = structlog.get_logger(actor="evaluator")


class DeferredEvaluator(Evaluator):
    """Keeps versions; after training, evaluates them in order until one reaches `target`, and the last one."""

    def __init__(
        self,
        *,
        name: str,
        services: Services,
        inbox: Inbox[PolicyUpdated],
        outbox: Outbox[EvalReport],
        target: float = 1.0,
        interval: int = 1,
    ) -> None:
        """target: an accuracy; 1.0 evaluates all versions unless one is perfect.

        interval: steps between evaluated versions; the last version is always evaluated.
        """
        assert services.replaced is not None
        super().__init__(**{**services.replaced.arguments, "inbox": inbox, "outbox": outbox})
        self.name = name
        self._target, self._interval = target, interval

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Signal readiness immediately, because the initial policy is not evaluated."""
        async with self._inbox, self._outbox:
            task_status.started()
            pinned: list[Pinned] = []
            async for update in self._inbox:
                report = update.report
                log.info(UPDATED, step=report.step)
                if pinned and pinned[-1].step % self._interval:
                    pinned.pop()
                pinned.append(Pinned(step=report.step, version=report.version, parameters=update.parameters))
            reached = False
            for one in pinned:
                if not reached or one is pinned[-1]:
                    reached = await self._look(one) or reached

    async def _look(self, pinned: Pinned) -> bool:
        """Evaluate and log one version. Returns whether it reaches the target."""
        report = await self._evaluate(pinned)
        self._reports.append(report)
        log.info(EVALUATED, step=report.step, accuracy=report.accuracy)
        return report.accuracy is not None and report.accuracy >= self._target
