"""The session: what a run says of itself is so, whatever stands at its boxes."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import structlog
from msgspec import structs
from rich.console import Console

from actors.prompter import Prompter
from clotho.run import build_actors as boxes
from clotho.run.context import RunContext
from clotho.run.startup import Components
from clotho.runtime.child import ChildState, ChildStatus, Restart
from clotho.runtime.latest import Latest
from clotho.runtime.queues import Queue
from clotho.training.ledger import Ledger
from protocols.accounting import LedgerState
from protocols.checkpoint import RunState
from protocols.evaluation import EvalReport
from protocols.step import PolicyUpdated, StepReport
from tests.actors.boxes import filled, prompt
from tests.run.assembled import assembled, tiny_profile

BOOKS = LedgerState(all_ended_below=3, ended_above=(6,), trained=2, discarded={"stale": 1, "zero_variance": 1})


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Components]:
    """The parts of a run of ten steps of two groups."""
    async with assembled(tiny_profile(tmp_path)) as made:
        yield made


class Anyone:
    """An actor that has nothing of what a box has."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def run(self) -> None:
        """Return."""


def session_of(parts: Components, **actors: Any) -> RunContext:
    """A session with these actors at their boxes."""
    session = RunContext(parts, Console(file=io.StringIO()), blas="none", listener=None)
    session.observe({"prompter": Anyone("prompter"), "monitor": Anyone("monitor"), **actors})
    return session


def resumed(parts: Components, *, asked: int) -> Components:
    """The same parts, of a run that had asked so many groups when it was killed."""
    state = RunState(
        step=2, version=2, fingerprint="", ledger=BOOKS, prompted=asked, random_state=(), bad_steps=0, train_seconds=0.0,
        sampled_tokens=100, trained_tokens=50, inputs={},
    )  # fmt: skip
    return structs.replace(parts, state=state, ledger=Ledger(BOOKS))


def prompter(parts: Components) -> Prompter:
    """The run's prompter."""
    session = SimpleNamespace(refills=Latest[int]("refills"))
    session.refills.put(0)
    return boxes.prompter(parts, cast(Any, session))(outbox=Queue[Any]("prompts", capacity=100).writer())


async def test_the_books_of_a_whole_run_count_what_is_left_where_it_lies(parts: Components) -> None:
    """Groups on their way to the learner, on inserted stretches too; the copies that a tap is given are no groups."""
    asking = prompter(parts)
    session = session_of(parts, prompter=asking)
    await asking.run()
    stretches = ("prompts", "rollouts.1", "scored.tapped", "scored.tap1", "reports", "updates.learner")
    session.measure([filled(name, [1, 2]) for name in stretches])
    for group_id in range(13):
        parts.ledger.train(group_id)
    parts.ledger.discard(13, "stale")
    assert str(session.books.balance(complete=True)) == "prompted 20 = trained 13 + discarded 1 + carried over 6"
    parts.ledger.discard(14, "stale")
    assert not session.books.balance(complete=True).holds, "one too many: nothing is made to fit"


async def test_of_a_run_cut_short_the_rest_is_carried_over(parts: Components) -> None:
    """Exactly what a resumed run asks again."""
    asking = prompter(parts)
    session = session_of(parts, prompter=asking)
    await asking.run()
    parts.ledger.train(3)
    assert session.books.balance(complete=False).carried_over == len(list(parts.ledger.unended(20))) == 19
    assert session.books.balance(complete=False).holds


@pytest.mark.parametrize(("asked", "drained"), [(20, True), (9, True), (20, False), (26, False)])
async def test_the_books_of_a_resumed_run_balance_however_much_was_asked_before(
    parts: Components, asked: int, drained: bool
) -> None:
    """Drained at once, or with fewer steps than the life before it had: what is not asked again is carried over."""
    parts = resumed(parts, asked=asked)
    asking = prompter(parts)
    session = session_of(parts, prompter=asking)
    if drained:
        asking.drain()
    again = list(parts.ledger.unended(20))
    await asking.run()
    sent = [group_id for group_id in again if group_id < asking.prompted_until]
    for group_id in sent:
        parts.ledger.train(group_id)
    balance = session.books.balance(complete=True)
    assert balance.holds, str(balance)
    assert balance.prompted == (20 if asked == 20 else 10 if drained else asked)
    assert balance.carried_over == max(0, asked - 20)


async def test_a_prompter_that_does_not_say_is_counted_by_what_it_sent(parts: Components) -> None:
    """Over all lives of the run."""
    session = session_of(parts)
    session.measure([filled("prompts", [prompt(0), prompt(1)])])
    assert session.books.asked() == 2
    session = session_of(resumed(parts, asked=9))
    session.measure([filled("prompts", [prompt(3), prompt(4)])])
    assert session.books.asked() == 4 + 2


async def test_a_drain_is_the_prompters_to_do(parts: Components) -> None:
    """One that cannot be drained is no reason to fail: the user is told what helps."""
    asking = prompter(parts)
    session_of(parts, prompter=asking).drain()
    await asking.run()
    assert asking.prompted_until == 0
    with structlog.testing.capture_logs() as logs:
        session_of(parts).drain()
    assert [line["event"] for line in logs] == ["the prompter cannot be drained: once more stops the run at once"]


async def test_nobody_waits_for_the_histories_of_another_monitor(parts: Components) -> None:
    """A replaced monitor does not say how far it has come, unless it holds the session's cell."""
    assert session_of(parts).recorded._closed
    session = RunContext(parts, Console(file=io.StringIO()), blas="none", listener=None)
    monitor = boxes.monitor(parts, session)(inbox=filled("reports", []).reader())
    session.observe({"monitor": monitor, "prompter": Anyone("prompter")})
    assert not session.recorded._closed
    await monitor.run()


async def test_health_names_what_failed_and_what_hangs(parts: Components) -> None:
    """A failed bystander is no outage; a compute thread that does not move is."""
    session = session_of(parts)
    assert (session.health().status, session.health().detail) == ("ok", "")
    states = {"monitor": ChildState.FAILED, "learner": ChildState.RUNNING}
    session.children = lambda: {
        name: ChildStatus(state=state, restart=Restart.TEMPORARY, restarts=0, error=None)
        for name, state in states.items()
    }
    assert session.health().status == "ok"
    assert "failed: monitor" in session.health().detail
    session.stall(130.0)
    assert session.health().status == "stalled"
    session.recover()
    assert session.health().status == "ok"


async def test_the_api_samples_as_the_profile_does_where_a_request_does_not_say(parts: Components) -> None:
    """So that an answer over HTTP is a rollout's unless something else is asked for."""
    assert session_of(parts).server_context().sampling == parts.profile.sampling


async def test_a_checkpoint_counts_over_all_lives_of_the_run(parts: Components) -> None:
    """Tokens of earlier lives included; what the learner says is kept as it is."""
    parts = resumed(parts, asked=9)
    asking = prompter(parts)
    session = session_of(parts, prompter=asking)
    report = StepReport(
        step=3, version=2, fingerprint="f", trained=(), discarded=(), staleness=(), update=None, train_seconds=0.0,
        wait_seconds=0.0,
    )  # fmt: skip
    update = PolicyUpdated(
        report=report, parameters={}, optimizer={}, random_state=(1, 2), ledger=BOOKS, bad_steps=1, train_seconds=7.0,
        trained_tokens=60,
    )  # fmt: skip
    assert session.run_state(update) == RunState(
        step=3, version=2, fingerprint="f", ledger=BOOKS, prompted=9, random_state=(1, 2), bad_steps=1, train_seconds=7.0,
        sampled_tokens=100, trained_tokens=60, inputs=parts.inputs,
    )  # fmt: skip


async def test_the_summary_compares_the_base_policy_with_the_last(parts: Components) -> None:
    """Measurements in between are neither; an evaluator that keeps none leaves the table without."""

    def report(step: int, *, final: bool = False) -> EvalReport:
        return EvalReport(
            step=step, version=step, problems=2, accuracy=step / 10, by_type={}, completion_tokens=0, seconds=2.0,
            final=final,
        )  # fmt: skip

    evaluator = Anyone("evaluator")
    vars(evaluator)["measured"] = [report(0), report(5), report(10, final=True)]
    summary = session_of(parts, prompter=prompter(parts), evaluator=evaluator).summary(complete=True)
    assert (summary.before, summary.after) == (report(0), report(10, final=True))
    assert summary.evaluation_seconds == 6.0
    bare = session_of(parts, prompter=prompter(parts)).summary(complete=True)
    assert (bare.before, bare.after, bare.balance.holds) == (None, None, True)


class Fetching(Anyone):
    """A fetcher that has received four groups, of which number 1 has ended."""

    prompted_until, reached = 4, 4
    received: ClassVar = {"a": 3, "b": 1}
    under_way: ClassVar = {0: "a", 1: "a", 2: "b", 3: "a"}


async def test_groups_from_environments_are_remembered_by_their_environment(parts: Components) -> None:
    """A checkpoint holds those that had not ended; cut short, the books carry them over, each to its own."""
    session = RunContext(parts, Console(file=io.StringIO()), blas="none", listener=None)
    session.observe({"atropos_fetcher": Fetching("atropos_fetcher"), "monitor": Anyone("monitor")})
    parts.ledger.train(1, source="a")
    assert session.books.received() == {"a": 3, "b": 1}
    assert session.books.under_way(parts.ledger) == {0: "a", 2: "b", 3: "a"}
    balance = session.books.balance(complete=False)
    assert balance.holds
    assert {name: own.carried_over for name, own in balance.sources.items()} == {"a": 2, "b": 1}
    assert not session.books.balance(complete=True).holds, "nothing lies anywhere, and three have not ended"


async def test_numbers_that_the_fetcher_has_forgotten_are_of_whom_the_books_miss_a_group(parts: Components) -> None:
    """It remembers so many of the latest; an older one may wait in a batch that takes long to form."""
    fetching = Fetching("atropos_fetcher")
    fetching.under_way = {2: "b", 3: "a"}  # type: ignore[misc]
    session = RunContext(parts, Console(file=io.StringIO()), blas="none", listener=None)
    session.observe({"atropos_fetcher": fetching, "monitor": Anyone("monitor")})
    parts.ledger.train(1, source="a")
    assert session.books.under_way(parts.ledger) == {0: "a", 2: "b", 3: "a"}
    assert session.books.balance(complete=False).holds


async def test_a_fetcher_that_does_not_say_what_it_received_is_taken_at_what_ended(parts: Components) -> None:
    """A user's own in its place."""
    session = RunContext(parts, Console(file=io.StringIO()), blas="none", listener=None)
    session.observe({"atropos_fetcher": Anyone("atropos_fetcher"), "monitor": Anyone("monitor")})
    parts.ledger.train(0, source="a")
    assert session.books.balance(complete=True).sources["a"].holds
