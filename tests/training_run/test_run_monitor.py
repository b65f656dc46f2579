"""The run monitor: health, the server's defaults, and the final summary."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clotho.settings.server import HttpServer
from pipeline import wire_services
from protocols.evaluation import EvalReport
from protocols.finding import CHECK, Finding
from tests.metric_samples import page, samples
from tests.training_run.built_context import open_context, tiny_profile
from tests.training_run.supervision.scripted_actors import ScriptedActor
from tests.training_run.test_accounting import MinimalActor
from training_run.accounting import CountedSource, GroupAccounting
from training_run.run import RunContext
from training_run.run_monitor import RunMonitor
from training_run.supervision.queues import Queue
from training_run.supervision.supervisor import ChildState, ChildStatus, Restart, temporary
from training_run.supervision.watchdog import EngineGuard

BATTERY = Finding(name="on_battery", severity="warning", fact="f", consequence="c", advice="a", remedy=CHECK)


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[RunContext]:
    """A run of ten steps of two groups."""
    async with open_context(tiny_profile(tmp_path, server={"type": "http", "port": 0})) as built:
        yield built


async def test_a_failed_temporary_actor_is_not_an_outage_and_a_stall_or_restart_is(context: RunContext) -> None:
    """/health names the failed actors."""
    states: dict[str, ChildState] = {}

    def children() -> dict[str, ChildStatus]:
        return {
            name: ChildStatus(state=state, restart=Restart.TEMPORARY, restarts=0, error=None)
            for name, state in states.items()
        }

    monitor = RunMonitor(context, queues=[], children=children)
    assert (monitor.serving.health().status, monitor.serving.health().detail) == ("ok", "")
    states.update(monitor=ChildState.FAILED, learner=ChildState.RUNNING)
    assert monitor.serving.health().status == "ok"
    assert "failed: monitor" in monitor.serving.health().detail
    monitor.serving.on_stall(130.0)
    assert monitor.serving.health().status == "stalled"
    monitor.serving.on_recovery()
    assert monitor.serving.health().status == "ok"
    states[EngineGuard.name] = ChildState.RESTARTING
    assert monitor.serving.health().status == "restarting"


async def test_requests_use_the_sampling_parameters_of_the_profile(context: RunContext) -> None:
    """An HTTP request without parameters samples like a rollout."""
    monitor = RunMonitor(context, queues=[], children=dict)
    assert monitor.server_context(HttpServer()).sampling == context.profile.sampling


async def test_metrics_include_every_queue(context: RunContext) -> None:
    """With the time spent waiting."""
    queue = Queue[int]("prompts", capacity=3)
    queue.outbox().send_nowait(1)
    monitor = RunMonitor(context, queues=[queue], children=dict)
    monitor.count_request()
    seen = samples(page(list(monitor.metrics("m", {}))))
    label = (("queue", "prompts"),)
    assert (seen["clotho_queue_depth", label], seen["clotho_queue_capacity", label]) == (1, 3)
    assert seen["clotho_queue_sent_messages_total", label] == 1
    assert seen["clotho_log_events_lost_total", ()] == 0
    assert (monitor.gauges().queues[0].depth, monitor.gauges().api_requests) == (1, 1)


async def test_the_summary_compares_the_base_policy_with_the_final_one(context: RunContext) -> None:
    """Evaluations in between are not compared. Without evaluations there is nothing to compare."""

    def report(step: int, *, final: bool = False) -> EvalReport:
        return EvalReport(
            step=step, version=step, problems=2, accuracy=step / 10, interval=(0.0, 1.0), by_type={},
            completion_tokens=0, seconds=2.0, final=final,
        )  # fmt: skip

    monitor = RunMonitor(context, queues=[], children=dict)
    accounting = GroupAccounting(context, CountedSource(context, MinimalActor(), Queue("prompts", capacity=1)), [])
    empty = monitor.summary(accounting, complete=True)
    assert (empty.before, empty.after, empty.balance.holds) == (None, None, True)
    context.history.reports.extend([report(0), report(5), report(10, final=True)])
    summary = monitor.summary(accounting, complete=True)
    assert (summary.before, summary.after) == (report(0), report(10, final=True))
    assert (summary.evaluation_seconds, summary.other_evaluation_seconds) == (2.0, 4.0)
    assert (summary.steps, summary.planned_steps) == (0, 10)


async def test_attachments_add_services(context: RunContext) -> None:
    """Beside the watchdog and the guard of the decode engine, with or without a server."""
    context.attached.services.append(temporary(ScriptedActor("another", [])))
    names = [child.actor.name for child in wire_services(context, RunMonitor(context, queues=[], children=dict), None)]
    assert (names[0], names[-1]) == ("watchdog", "another")
    assert "decode engine" in names


async def test_gauges_have_the_findings_and_what_the_learner_waits_for(context: RunContext) -> None:
    """Nothing is waited for while an update is computed. /health has the findings too, and stays ok."""
    monitor = RunMonitor(context, queues=[], children=dict)
    assert monitor.gauges().waiting_for
    context.findings.add(BATTERY)
    assert [finding.name for finding in monitor.gauges().findings] == ["on_battery"]
    health = monitor.server_context(HttpServer()).health()
    assert (health.status, [finding.name for finding in health.findings]) == ("ok", ["on_battery"])
    context.progress.updating = True
    assert monitor.gauges().waiting_for == ""
