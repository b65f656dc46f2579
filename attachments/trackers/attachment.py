"""Trackers of a run: opened when it has been loaded, told what the monitor sees, and closed at its end."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attachments.trackers.sections import TRACKERS
from protocols.evaluation import EvalReport
from protocols.finding import Finding
from protocols.step import StepReport
from training_run.profile.rules import Rule
from training_run.supervision.hooks import ReportObserver

if TYPE_CHECKING:
    from attachments.trackers.trackers import Tracker
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


class TrackedReports(ReportObserver):
    """Passes steps, evaluations and findings to trackers."""

    def __init__(self, trackers: tuple[Tracker, ...]) -> None:
        self._trackers = trackers

    def step(self, report: StepReport, line: Mapping[str, Any]) -> None:
        """Pass the metrics of a step and some of its completions on."""
        from attachments.trackers.trackers import step_records

        for tracker in self._trackers:
            for record in step_records(report, line, tracker.completions):
                tracker.put(record)

    def evaluation(self, report: EvalReport) -> None:
        """Pass an evaluation on."""
        from attachments.trackers.trackers import evaluation_values

        for tracker in self._trackers:
            tracker.put(evaluation_values(report))

    def finding(self, step: int, finding: Finding) -> None:
        """Pass a finding on as a warning."""
        from attachments.trackers.trackers import Warned

        for tracker in self._trackers:
            tracker.put(Warned(step=step, text=finding.text))


MAY_CHANGE = ("trackers",)
CONTRADICTIONS = (
    Rule(
        "trackers",
        lambda v, x: any(one.mode != "auto" and one.name != "wandb" for one in x),
        "have a mode for wandb only; trackio and tensorboard always write to this machine",
    ),
)


def check(profile: Profile) -> None:
    """Raise ProfileError if a tracker is listed twice, or its library is not installed."""
    if sections := TRACKERS.of(profile):
        from attachments.trackers.trackers import require_trackers

        require_trackers(sections)


async def prepare(plan: Plan) -> Attach | None:
    """Open the trackers when the run is loaded, so that a start that fails leaves no trace in them."""
    if not TRACKERS.of(plan.profile):
        return None

    async def attach(run: RunContext) -> None:
        """Open the trackers, and close them at the end of the run."""
        from attachments.trackers.trackers import TrackedRun, close_trackers, open_trackers
        from training_run.profile.load import resolved_toml

        profile, directory = run.profile, run.directory
        settings = tomllib.loads(resolved_toml(profile, mask_secrets=True))
        tracked = TrackedRun(id=directory.run_id, name=directory.path.name, directory=directory.path, settings=settings)
        trackers = open_trackers(profile.tracking, TRACKERS.of(profile), tracked)
        run.attached.ending.callback(close_trackers, trackers)
        run.attached.observers.append(TrackedReports(trackers))

    return attach
