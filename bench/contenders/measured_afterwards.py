"""An evaluator that waits until the run has learned, so that measuring every version of the policy costs it nothing."""

from __future__ import annotations

from typing import Any

import anyio
import structlog
from anyio.abc import TaskStatus

from actors.evaluator import Evaluator, Pinned
from clotho.runtime.plugins import Services
from clotho.runtime.queues import Inbox, Outbox
from protocols.evaluation import EvalReport
from protocols.step import PolicyUpdated

MEASURED = "measured afterwards"
"""The event of a line in log.jsonl for each version: its step and its accuracy."""

MADE = "policy updated"
"""The event of a line that is written as soon as a version is there: its step."""

log = structlog.get_logger(actor="evaluator")


class MeasuredAfterwards(Evaluator):
    """Pins every version; after the last update measures them in order, until one reaches `target`, and the last."""

    def __init__(
        self,
        *,
        name: str,
        services: Services,
        inbox: Inbox[PolicyUpdated],
        outbox: Outbox[EvalReport],
        target: float = 1.0,
    ) -> None:
        """target: an accuracy; 1.0 measures all of them, unless one is perfect."""
        assert services.default is not None
        keywords: dict[str, Any] = getattr(services.default, "keywords")  # noqa: B009, a partial, typed as a callable
        super().__init__(inbox=inbox, outbox=outbox, **keywords)
        self.name = name
        self._target = target

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Ready at once."""
        async with self._inbox, self._outbox:
            task_status.started()
            pinned = []
            async for update in self._inbox:
                report = update.report
                log.info(MADE, step=report.step)
                pinned.append(Pinned(step=report.step, version=report.version, parameters=update.parameters))
            reached = False
            for one in pinned:
                if not reached or one is pinned[-1]:
                    reached = await self._look(one) or reached

    async def _look(self, pinned: Pinned) -> bool:
        """Measure and log; whether it reaches the target."""
        report = await self._measure(pinned)
        self.measured.append(report)
        log.info(MEASURED, step=report.step, accuracy=report.accuracy)
        return report.accuracy >= self._target
