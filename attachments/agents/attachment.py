"""Episodes of several turns in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attachments.agents.sections import AGENT, PythonAgent
from clotho.settings.bounds import Off
from training_run.attachment import Attach, Attachment, MakeEpisodes, Plan
from training_run.profile.rules import Complaint, Rule

if TYPE_CHECKING:
    from contextlib import ExitStack

    from attachments.agents.episodes import PythonEpisodes
    from clotho.models.tokenizer import ChatTokenizer
    from training_run.memory.need import MemoryNeed
    from training_run.profile.command_profiles import EvaluationProfile
    from training_run.profile.schema import Profile
    from training_run.run import RunContext


class Agents(Attachment):
    """`[agent]` of a profile."""

    contradictions = (
        Rule(
            "sampling.stop sampling.stop_token_ids sampling.ignore_eos",
            lambda v, x: bool(x) and v["agent.type"] != "off",
            "= {} and agent exclude each other: a message of an episode ends with an end token of the model",
        ),
    )
    metrics: ClassVar[Mapping[str, str]] = {
        "agent/turns": "Messages of the policy per episode since the last step; null without an agent.",
        "agent/tool_calls": "Calls of tools per episode.",
        "agent/tool_errors": "Share of the calls of tools that failed; null without calls.",
        "agent/limited": "Share of the episodes that a limit of `agent` ended.",
        "agent/failed": "Number of episodes that failed, because the environment did; they are not trained on.",
        "agent/seconds": "Seconds per episode in which it waited for its environment.",
    }

    def slots(self, profile: Profile) -> Mapping[str, str]:
        """What an episode is."""
        return {"episodes": 'agent = "python"'} if isinstance(AGENT.of(profile), PythonAgent) else {}

    def complaints(self, profile: Profile) -> Iterable[Complaint]:
        """Refuse the reward of an environment without an environment."""
        if AGENT.of(profile) == Off() and any(reward.name == "environment" for reward in profile.rewards):
            text = 'rewards.name = "environment" is the reward of the environment in agent, which is off'
            yield Complaint("rewards.name", text)

    def memory(self, need: MemoryNeed) -> None:
        """Episodes are sequences of which any part may be sampled."""
        if need.profile is not None and isinstance(settings := AGENT.of(need.profile), PythonAgent):
            need.sequence_tokens = settings.max_tokens

    async def prepare(self, plan: Plan) -> Attach | None:
        """Import the environment in a worker process, and describe its tools."""
        make = await self._episodes(plan.profile, plan.ending, in_rounds=not plan.profile.asynchronous)
        if make is None:
            return None

        async def attach(run: RunContext) -> None:
            """Make episodes with the tokenizer of the policy."""
            run.attached.episodes = episodes = make(run.policy.tokenizer, run.policy.context_length)
            run.attached.measures.append(lambda _: measured(episodes))

        return attach

    async def evaluated(self, profile: EvaluationProfile, ending: ExitStack) -> MakeEpisodes | None:
        """Import the environment, and make episodes in rounds."""
        return await self._episodes(profile, ending, in_rounds=True)

    async def _episodes(
        self, profile: Profile | EvaluationProfile, ending: ExitStack, *, in_rounds: bool
    ) -> Callable[[ChatTokenizer, int], PythonEpisodes] | None:
        settings = AGENT.of(profile)
        if not isinstance(settings, PythonAgent):
            return None
        from attachments.agents.workers import Workers

        workers = Workers(settings)
        ending.callback(workers.close)
        tools = await workers.tools()

        def make(tokenizer: ChatTokenizer, context_length: int) -> PythonEpisodes:
            """Return the source of episodes."""
            from attachments.agents.episodes import PythonEpisodes

            return PythonEpisodes(
                settings,
                workers,
                tokenizer,
                tools=tools,
                sampling=profile.sampling,
                system=profile.data.system,
                context_length=context_length,
                in_rounds=in_rounds,
            )

        return make


def measured(episodes: PythonEpisodes) -> dict[str, Any]:
    """Return the values of the metrics since the last call."""
    counts = episodes.take_counts()
    number = counts.episodes or 1
    return {
        "agent/turns": counts.turns / number,
        "agent/tool_calls": counts.tool_calls / number,
        "agent/tool_errors": counts.tool_errors / counts.tool_calls if counts.tool_calls else None,
        "agent/limited": counts.limited / number,
        "agent/failed": counts.failed,
        "agent/seconds": counts.seconds / number,
    }


ATTACHMENT = Agents()
