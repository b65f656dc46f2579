"""What attachments with environments have in common: limits, metrics, and settings that episodes exclude."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from training_run.profile.rules import Rule, Values

Credit = Literal["episode", "turn"]


class EpisodeLimits(Struct, frozen=True, kw_only=True):
    """Limits of an episode: messages of the policy, and tokens of a row. credit: what advantages follow from."""

    max_turns: int
    max_tokens: int
    credit: Credit = "episode"


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
