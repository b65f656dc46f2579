"""What attachments with environments have in common: limits, metrics, excluded settings, and how they take part."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from training_run.profile.rules import Rule, Values

if TYPE_CHECKING:
    from contextlib import ExitStack

    from clotho.models.tokenizer import ChatTokenizer
    from training_run.episodes.episodes import EnvironmentEpisodes
    from training_run.episodes.started import StartedEnvironments
    from training_run.profile.command_profiles import EvaluationProfile
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


METRICS: Mapping[str, str] = {
    "turns": "Messages of the policy per episode since the last step; null without an environment.",
    "tool_calls": "Calls of tools per episode.",
    "tool_errors": "Share of the calls of tools that failed; null without calls.",
    "limited": "Share of the episodes that a limit ended.",
    "failed": "Number of episodes that failed, because the environment did; they are not trained on.",
    "forked": "Number of conversations that were begun anew, each as one more row.",
    "seconds": "Seconds per episode in which it waited for its environment.",
}
"""Metrics of the episodes of an attachment, with descriptions."""


def episode_metrics(attachment: str) -> dict[str, str]:
    """Return the metrics of the episodes of an attachment under their names in metrics.jsonl."""
    return {f"{attachment}/{name}": text for name, text in METRICS.items()}


def ends_messages(setting: str, active: Callable[[Values], bool]) -> Rule:
    """Refuse other ends of messages than end tokens, where a setting makes episodes."""
    return Rule(
        "sampling.stop sampling.stop_token_ids sampling.ignore_eos",
        lambda v, x: bool(x) and active(v),
        f"= {{}} and {setting} exclude each other: a message of an episode ends with an end token of the model",
    )


Start = Callable[["Profile | EvaluationProfile", "ExitStack"], Awaitable["StartedEnvironments | None"]]
"""Starts the environments of a profile; None: they are not used. The second argument is closed at the end."""


async def prepare_episodes(start: Start, plan: Plan, prefix: str) -> Attach | None:
    """Start the environments of a run, which makes its episodes in them. prefix: of their metrics."""
    started = await start(plan.profile, plan.ending)
    if started is None:
        return None
    from training_run.episodes.started import episodes_in, require_usable

    plan.checks.append(partial(require_usable, started))

    async def attach(run: RunContext) -> None:
        """Make episodes with the tokenizer of the policy."""
        policy, in_rounds = run.policy, not plan.profile.asynchronous
        run.attached.episodes = episodes = episodes_in(
            started, plan.profile, policy.tokenizer, policy.context_length, in_rounds=in_rounds
        )
        run.attached.measures.append(lambda _: episodes.measured(prefix))

    return attach


async def episodes_of(
    start: Start, profile: Profile | EvaluationProfile, ending: ExitStack
) -> Callable[[ChatTokenizer, int], EnvironmentEpisodes] | None:
    """Start the environments. The returned function makes the source of episodes; None: they are not used."""
    started = await start(profile, ending)
    if started is None:
        return None
    from training_run.episodes.started import episodes_in

    return partial(episodes_in, started, profile)
