"""An Atropos fetcher with a scripted source and a scripted reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
from msgspec import Raw

from actors.atropos_fetcher import AtroposFetcher
from protocols.batches import GroupSupply
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from protocols.sampling import Completion
from protocols.step import WeightsReady
from tests.actors.actor_helpers import receive_all
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue

Batch = Sequence[str] | None


class Source:
    """Returns the given batches of names, then waits. opened: steps of all calls of open; closed: number of calls."""

    def __init__(self, batches: Sequence[Batch], *, refusal: Exception | None = None, reachable: bool = True) -> None:
        self.batches, self.refusal, self.reachable = list(batches), refusal, reachable
        self.steps: list[int] = []
        self.opened: list[int] = []
        self.closed = 0

    async def open(self, *, step: int) -> None:
        """Succeed, raise the error, or never return."""
        if self.refusal:
            raise self.refusal
        if not self.reachable:
            await anyio.sleep_forever()
        self.opened.append(step)

    async def batch(self, *, step: int) -> list[Raw] | None:
        """Return the next batch."""
        if not self.batches:
            await anyio.sleep_forever()
        self.steps.append(step)
        batch = self.batches.pop(0)
        return None if batch is None else [Raw(msgspec.json.encode(name)) for name in batch]

    async def waiting_for(self) -> str:
        """Return a reason."""
        return "Godot"

    async def close(self) -> None:
        """Count the call."""
        self.closed += 1


class Reader:
    """Reads names; a name with an exclamation mark is invalid."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def read(self, raw: Raw, *, group_id: int, version: int) -> GroupOutcome:
        """Return a group of the environment with that name."""
        self.versions.append(version)
        name = msgspec.json.decode(raw, type=str)
        problem = Problem(prompt="", answer="", type=name)
        prompt = Prompt(group_id=group_id, problem=problem, tokens=(1,), seed=0, source=name.strip("!"))
        if "!" in name:
            return Discarded(prompt=prompt, reason="invalid", detail="no")
        completion = Completion(tokens=(2,), logprobs=(-1.0,), versions=(version,), text="", finish_reason="stop")
        rollout = RolloutGroup(prompt=prompt, completions=(completion,))
        return ScoredGroup(group=rollout, rewards=(1.0,), parts={})


class FetcherHarness:
    """A fetcher of these batches; a batch of the run has two groups."""

    def __init__(
        self,
        batches: Sequence[Batch] = (),
        *,
        source: Any = None,
        ahead: int = 100,
        groups: int = 1000,
        capacity: int = 100,
        reader: Any = None,
        poll_seconds: float = 0.05,
        patience_seconds: float = 60.0,
        **more: Any,
    ) -> None:
        self.weights, self.replacements = Latest[WeightsReady]("weights"), Latest[int]("refills")
        self.serve(0)
        self.replacements.put(0)
        self.scored = Queue[GroupOutcome]("scored", capacity=capacity)
        self.outcomes = self.scored.inbox()
        self.source = source or Source(batches)
        self.reader = reader or Reader()
        defaults: dict[str, Any] = {"first_group": 0, "received": {}, "lost": {}, "ended": 0}
        self.fetcher = AtroposFetcher(
            outbox=self.scored.outbox(),
            supply=GroupSupply(
                source=self.source, reader=self.reader, poll_seconds=poll_seconds, patience_seconds=patience_seconds
            ),
            weights=self.weights,
            replacements=self.replacements,
            groups=groups,
            batch_size=2,
            max_batches_ahead=ahead,
            **defaults | more,
        )

    def serve(self, step: int) -> None:
        """Publish the weights of a step."""
        self.weights.put(WeightsReady(version=10 + step, step=step, fingerprint=""))


def numbers(outcomes: Sequence[GroupOutcome]) -> list[int]:
    """Return the group IDs in order."""
    return [one.prompt.group_id for one in outcomes]


async def fetched(harness: FetcherHarness, *, steps: Callable[[], object]) -> list[GroupOutcome]:
    """Run until all tasks wait, call `steps`, and receive all outcomes."""
    received: list[GroupOutcome] = []

    async def read() -> None:
        received.extend(await receive_all(harness.outcomes))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(harness.fetcher.run)
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            steps()
    return received
