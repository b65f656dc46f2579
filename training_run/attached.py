"""What attachments have added to a run: its slots, hooks, observers and children."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from clotho.lanes.sampling_client import GroupSampler
    from clotho.serving.services import SampleRecorder
    from protocols.accounting import Balance
    from protocols.batches import GroupSupply
    from protocols.queues import Inbox
    from protocols.rollout import GroupRewards
    from protocols.step import PolicyUpdated
    from training_run.directory.checkpoint_parts import CheckpointParts
    from training_run.groups.rollout_source import Episodes
    from training_run.records.display import RunFacts
    from training_run.supervision.hooks import Chooser, Measure, ReportObserver, UpdateHook
    from training_run.supervision.queues import Queue
    from training_run.supervision.supervisor import Child


class Wired(Struct, frozen=True, kw_only=True, eq=False):
    """Wiring -> attachments: what is known when the actors of the flow have been constructed.

    queues: all queues of the run, those of a channel in the order in which messages pass them. facts: of the display.
    """

    queues: Sequence[Queue[Any]]
    facts: RunFacts


class Attached(Struct, kw_only=True, eq=False):
    """Attachments -> wiring: what they have added to a run that is loaded and has not begun.

    ending: closed when the run ends, last in, first out. parts: what they keep in checkpoints. hooks: asked by the
    learner. observers: told by the monitor. updates: queues to those that receive every update, by name.

    Slots: chooser: of problems; None: the order of the dataset. sampler: samples the rollouts; None: the run's own
    engine. groups: come in the place of those that the run makes from its dataset; None: it makes them. episodes: come
    in the place of completions; None: a group has completions of its prompt.

    Children: services: beside the flow of groups. receivers: start before those that make groups. senders: start last.
    recorders: return children that record the flow.

    scoring: wraps what scores groups, the rewards of the run or what was wrapped before.

    samples: records what clients of the HTTP server have sampled. measures: return values of metrics for the next line
    of metrics.jsonl. metrics: yield metrics for /metrics. balances: how what they count has ended, by the name in the
    summary. sampled_elsewhere: returns the number of tokens that others than the engine of the run have sampled.
    """

    ending: ExitStack
    parts: CheckpointParts
    chooser: Chooser | None = None
    hooks: list[UpdateHook] = field(default_factory=list)
    observers: list[ReportObserver] = field(default_factory=list)
    services: list[Child] = field(default_factory=list)
    receivers: list[Child] = field(default_factory=list)
    senders: list[Child] = field(default_factory=list)
    recorders: list[Callable[[Wired], Child]] = field(default_factory=list)
    updates: dict[str, Queue[PolicyUpdated]] = field(default_factory=dict)
    sampler: GroupSampler | None = None
    groups: GroupSupply[Any] | None = None
    episodes: Episodes | None = None
    scoring: list[Callable[[GroupRewards], GroupRewards]] = field(default_factory=list)
    samples: SampleRecorder | None = None
    measures: list[Measure] = field(default_factory=list)
    metrics: list[Callable[[], Iterable[Metric]]] = field(default_factory=list)
    balances: dict[str, Callable[[], Balance]] = field(default_factory=dict)
    sampled_elsewhere: Callable[[], int] = int

    def receive_updates(self, name: str) -> Inbox[PolicyUpdated]:
        """Return the inbox of a further receiver of updates. The learner waits until it has taken the last one."""
        from training_run.supervision.queues import Queue

        self.updates[name] = queue = Queue["PolicyUpdated"](f"updates.{name}", capacity=1)
        return queue.inbox()
