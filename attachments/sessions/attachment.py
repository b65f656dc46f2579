"""Sessions of HTTP clients in a run: what they sample and how they are rewarded takes the place of its groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attachments.sessions.sections import SESSIONS, HttpSessions

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


MAY_CHANGE = ("sessions.max_kept_mib", "sessions.max_open", "sessions.reward_seconds")
METRICS: Mapping[str, str] = {
    "sessions/open": "Number of sessions without a reward; null without sessions.",
    "sessions/rewarded": "Number of rewards that were accepted since the process was started.",
    "sessions/dropped": "Number of sessions of the run that were not trained on, by reason.",
    "sessions/refused": "Number of posts and requests that were refused since the process was started, by reason.",
    "sessions/forked": "Number of rows beyond the first of a session since the process was started.",
    "sessions/untrainable": "Number of answers that cannot be trained on since the process was started.",
}


def slots(profile: Profile) -> Mapping[str, str]:
    """Clients choose their problems, and sample on the HTTP server of the run."""
    if not isinstance(SESSIONS.of(profile), HttpSessions):
        return {}
    return dict.fromkeys(("groups", "sampler", "episodes", "chooser"), 'sessions = "http"')


def memory(need: MemoryNeed) -> None:
    """Sessions are sequences of which any part may be sampled."""
    if need.profile is not None and isinstance(settings := SESSIONS.of(need.profile), HttpSessions):
        need.sequence_tokens = settings.max_tokens


async def prepare(plan: Plan) -> Attach | None:
    """Record sessions, and let the run fetch their groups."""
    settings = SESSIONS.of(plan.profile)
    if not isinstance(settings, HttpSessions):
        return None

    async def attach(run: RunContext) -> None:
        """Continue the counts of the checkpoint. Sessions that had not ended are gone."""
        from attachments.sessions.supply import supply_sessions

        supply_sessions(run, settings)

    return attach
