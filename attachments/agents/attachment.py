"""Episodes of several turns in a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attachments.agents.sections import AGENT, PythonAgent
from training_run.episodes.attachment import (
    ends_messages,
    episode_metrics,
    episodes_of,
    prepare_episodes,
)

if TYPE_CHECKING:
    from contextlib import ExitStack

    from training_run.commands.evaluate import MakeEpisodes
    from training_run.episodes.started import StartedEnvironments
    from training_run.memory.need import MemoryNeed
    from training_run.profile.command_profiles import EvaluationProfile
    from training_run.profile.schema import Profile
    from training_run.start.startup import Attach, Plan


CONTRADICTIONS = (ends_messages("agent", lambda v: v["agent.type"] != "off"),)
PREFIX = "agent"
METRICS: Mapping[str, str] = episode_metrics(PREFIX)


def slots(profile: Profile) -> Mapping[str, str]:
    """What an episode is."""
    return {"episodes": 'agent = "python"'} if isinstance(AGENT.of(profile), PythonAgent) else {}


def memory(need: MemoryNeed) -> None:
    """Episodes are sequences of which any part may be sampled."""
    if need.profile is not None and isinstance(settings := AGENT.of(need.profile), PythonAgent):
        need.sequence_tokens = settings.max_tokens


async def _environments(profile: Profile | EvaluationProfile, ending: ExitStack) -> StartedEnvironments | None:
    """Import the environment in worker processes, and describe its tools."""
    settings = AGENT.of(profile)
    if not isinstance(settings, PythonAgent):
        return None
    from attachments.agents.workers import Workers
    from training_run.episodes.messages import EpisodeLimits
    from training_run.episodes.started import StartedEnvironments

    limits = EpisodeLimits(max_turns=settings.max_turns, max_tokens=settings.max_tokens, credit=settings.credit)
    workers = Workers(settings)
    ending.callback(workers.close)
    found = await workers.described()
    return StartedEnvironments(
        environments=workers,
        limits=limits,
        name=f"agent.environment {settings.environment!r}",
        tools=found.tools,
        required=found.required,
        system=profile.data.system,
    )


async def prepare(plan: Plan) -> Attach | None:
    """Start the environments of a run."""
    return await prepare_episodes(_environments, plan, PREFIX)


async def evaluated(profile: EvaluationProfile, ending: ExitStack) -> MakeEpisodes | None:
    """Start the environments of `eval`."""
    return await episodes_of(_environments, profile, ending)
