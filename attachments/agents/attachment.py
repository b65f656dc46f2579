"""Episodes of several turns in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from attachments.agents.sections import AGENT, PythonAgent
from training_run.episodes.attachment import EpisodeAttachment, EpisodeLimits, ends_messages, episode_metrics

if TYPE_CHECKING:
    from contextlib import ExitStack

    from clotho.models.tokenizer import ChatTokenizer
    from training_run.episodes.episodes import EnvironmentEpisodes
    from training_run.memory.need import MemoryNeed
    from training_run.profile.command_profiles import EvaluationProfile
    from training_run.profile.schema import Profile


class Agents(EpisodeAttachment):
    """`[agent]` of a profile."""

    contradictions = (ends_messages("agent", lambda v: v["agent.type"] != "off"),)
    prefix = "agent"
    metrics: ClassVar[Mapping[str, str]] = episode_metrics(prefix)

    def slots(self, profile: Profile) -> Mapping[str, str]:
        """What an episode is."""
        return {"episodes": 'agent = "python"'} if isinstance(AGENT.of(profile), PythonAgent) else {}

    def memory(self, need: MemoryNeed) -> None:
        """Episodes are sequences of which any part may be sampled."""
        if need.profile is not None and isinstance(settings := AGENT.of(need.profile), PythonAgent):
            need.sequence_tokens = settings.max_tokens

    async def episodes(
        self, profile: Profile | EvaluationProfile, ending: ExitStack, *, in_rounds: bool
    ) -> Callable[[ChatTokenizer, int], EnvironmentEpisodes] | None:
        """Import the environment in worker processes, and describe its tools."""
        settings = AGENT.of(profile)
        if not isinstance(settings, PythonAgent):
            return None
        from attachments.agents.workers import Workers

        limits = EpisodeLimits(max_turns=settings.max_turns, max_tokens=settings.max_tokens, credit=settings.credit)
        workers = Workers(settings)
        ending.callback(workers.close)
        tools = await workers.tools()

        def make(tokenizer: ChatTokenizer, context_length: int) -> EnvironmentEpisodes:
            """Return the source of episodes."""
            from training_run.episodes.conversations import ChatWriter
            from training_run.episodes.episodes import EnvironmentEpisodes

            return EnvironmentEpisodes(
                limits,
                workers,
                ChatWriter(tokenizer, tools=tools, system=profile.data.system),
                sampling=profile.sampling,
                context_length=context_length,
                in_rounds=in_rounds,
            )

        return make


ATTACHMENT = Agents()
