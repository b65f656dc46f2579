"""Group accounting: the conservation equation holds for finished, drained, stopped and resumed runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from anyio.from_thread import start_blocking_portal
from msgspec import structs

from actors.prompter import Prompter
from protocols.accounting import GroupSource, LedgerState
from protocols.checkpoint import RunState
from protocols.prompt import Prompt
from tests.actors.actor_helpers import filled_queue, policy_updated, prompt
from tests.training_run.built_context import open_context, tiny_profile
from training_run.accounting import CountedSource, GroupAccounting, group_source
from training_run.groups.ledger import Ledger
from training_run.run import RunContext
from training_run.supervision.queues import Queue

LEDGER = LedgerState(all_ended_below=3, ended_above=(6,), trained=2, discarded={"stale": 1, "zero_variance": 1})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """A run of ten steps of two groups."""
    opened = open_context(tiny_profile(tmp_path_factory.mktemp("accounting")))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(opened) as context:
        yield context


@pytest.fixture
def context(built: RunContext) -> RunContext:
    """The run with a ledger of its own, in which no group has ended."""
    return structs.replace(built, ledger=Ledger())


class MinimalActor:
    """An actor without the attributes of a group source."""

    name = "minimal"

    async def run(self) -> None:
        """Return."""


def resumed(context: RunContext, *, prompted: int) -> RunContext:
    """The context of a run that had prompted this many groups before it was stopped."""
    state = RunState(
        step=2, version=2, fingerprint="", ledger=LEDGER, prompted=prompted, random_state=(), bad_steps=0,
        train_seconds=0.0, sampled_tokens=100, trained_tokens=50, inputs={},
    )  # fmt: skip
    return structs.replace(context, start=structs.replace(context.start, state=state), ledger=Ledger(LEDGER))


def prompter(context: RunContext) -> Prompter:
    """The run's prompter."""
    return Prompter(
        outbox=Queue[Prompt]("prompts", capacity=100).outbox(),
        make=context.prompts.prompt,
        group_ids=context.ledger.unended(context.total_groups),
        batch_size=context.profile.learner.batch_size,
        replacements=context.progress.replacements,
        ended=context.ledger.ended,
        prompted_until=context.start.state.prompted if context.start.state else 0,
    )


def accounting(context: RunContext, source: GroupSource, *queues: Queue[Any]) -> GroupAccounting:
    """Group accounting of a source and these queues."""
    return GroupAccounting(context, source, queues)


async def test_groups_left_in_queues_of_a_complete_run_are_carried_over(context: RunContext) -> None:
    """Groups that no actor has received are counted in the queues between source and learner."""
    source = prompter(context)
    await source.run()
    groups = accounting(context, source, *(filled_queue(name, [1, 2]) for name in ("prompts", "rollouts.1", "scored")))
    for group_id in range(13):
        context.ledger.train(group_id)
    context.ledger.discard(13, "stale")
    assert str(groups.balance(complete=True)) == "prompted 20 = trained 13 + discarded 1 + carried over 6"


async def test_a_stopped_run_carries_over_every_group_that_has_not_ended(context: RunContext) -> None:
    """A resumed run prompts exactly these groups again."""
    source = prompter(context)
    await source.run()
    context.ledger.train(4)
    balance = accounting(context, source).balance(complete=False)
    assert balance.carried_over == len(list(context.ledger.unended(20))) == 19
    assert balance.holds


@pytest.mark.parametrize(("prompted", "drained"), [(20, True), (9, True), (20, False), (26, False)])
async def test_the_balance_of_a_resumed_run_holds(context: RunContext, prompted: int, drained: bool) -> None:
    """Groups that are not prompted again, because the run was drained or has fewer steps, are carried over."""
    context = resumed(context, prompted=prompted)
    source = prompter(context)
    if drained:
        source.drain()
    again = list(context.ledger.unended(20))
    await source.run()
    for group_id in again:
        if group_id < source.prompted_until:
            context.ledger.train(group_id)
    balance = accounting(context, source).balance(complete=True)
    assert balance.holds, str(balance)
    assert balance.prompted == (20 if prompted == 20 else 10 if drained else prompted)
    assert balance.carried_over == max(0, prompted - 20)


async def test_messages_of_a_custom_source_are_counted(context: RunContext) -> None:
    """Groups that ended before the last start are added. The counted source cannot be drained, and logs that."""
    queue: Queue[Any] = filled_queue("prompts", [prompt(0), prompt(1)])
    assert CountedSource(context, MinimalActor(), queue).prompted_until == 2
    source = group_source(resumed(context, prompted=9), MinimalActor(), queue)
    assert source.prompted_until == 4 + 2
    with structlog.testing.capture_logs() as logs:
        source.drain()
    assert [line["event"] for line in logs] == ["drain_not_supported"]


async def test_a_source_that_implements_the_protocol_is_used_itself(context: RunContext) -> None:
    """The prompter does."""
    source = prompter(context)
    assert group_source(context, source, filled_queue("prompts", [])) is source


async def test_checkpoint_totals_include_earlier_starts(context: RunContext) -> None:
    """Sampled tokens are added; the learner's values are kept unchanged."""
    update = policy_updated(
        {}, step=3, version=2, random_state=(1, 2), ledger=LEDGER, bad_steps=1, train_seconds=7.0, trained_tokens=60
    )
    assert accounting(context, prompter(context)).run_state(update).sampled_tokens == 0
    context = resumed(context, prompted=9)
    assert accounting(context, prompter(context)).run_state(update) == RunState(
        step=3, version=2, fingerprint="f", ledger=LEDGER, prompted=9, random_state=(1, 2), bad_steps=1,
        train_seconds=7.0, sampled_tokens=100, trained_tokens=60, inputs=context.inputs,
    )  # fmt: skip


class FakeFetcher:
    """A source that has received four groups."""

    name = "fetcher"
    prompted_until, sent_until = 4, 4

    def __init__(self, in_flight: dict[int, str]) -> None:
        self.received = {"a": 3, "b": 1}
        self.in_flight = in_flight

    def drain(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("remembered", [{0: "a", 1: "a", 2: "b", 3: "a"}, {2: "b", 3: "a"}])
async def test_groups_in_flight_keep_their_environment(context: RunContext, remembered: dict[int, str]) -> None:
    """The environments of groups that the source no longer remembers follow from the counts."""
    groups = accounting(context, FakeFetcher(remembered))
    context.ledger.train(1, source="a")
    assert groups.received == {"a": 3, "b": 1}
    assert groups.in_flight(context.ledger) == {0: "a", 2: "b", 3: "a"}
    balance = groups.balance(complete=False)
    assert balance.holds
    assert {name: counts.carried_over for name, counts in balance.sources.items()} == {"a": 2, "b": 1}
    assert not groups.balance(complete=True).holds, "no queue contains the three groups that have not ended"


async def test_a_custom_fetcher_counts_what_has_ended_as_received(context: RunContext) -> None:
    """The balance of each environment then holds."""
    context.ledger.train(0, source="a")
    source = CountedSource(context, MinimalActor(), filled_queue("scored", [1], ended=False))
    balance = accounting(context, source).balance(complete=True)
    assert {name: str(counts) for name, counts in balance.sources.items()} == {
        "a": "prompted 1 = trained 1 + discarded 0 + carried over 0"
    }
