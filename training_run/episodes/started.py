"""Environments that were started: what they need of a run, and the episodes in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from protocols.errors import ProfileError, did_you_mean
from training_run.episodes.conversations import ChatWriter
from training_run.episodes.episodes import EnvironmentEpisodes
from training_run.episodes.messages import Environments, EpisodeLimits

if TYPE_CHECKING:
    from clotho.models.tokenizer import ChatTokenizer
    from protocols.prompt import Problem
    from training_run.profile.command_profiles import EvaluationProfile
    from training_run.profile.schema import Profile


class StartedEnvironments(Struct, frozen=True, kw_only=True):
    """Environments that were started, and their episodes. tools: of all of them. system: system message of prompts.

    name: in error messages. required: columns of the dataset without which no episode begins.
    """

    environments: Environments
    limits: EpisodeLimits
    name: str = ""
    required: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    system: str = ""


def require_usable(started: StartedEnvironments, tokenizer: ChatTokenizer, problems: Sequence[Problem]) -> None:
    """Check that the template writes conversations, and the dataset has the columns that an episode begins with.

    Raises ProfileError.
    """
    ChatWriter(tokenizer, tools=started.tools, system=started.system)
    columns = set[str]().union(*(problem.extra for problem in problems))
    if missing := [name for name in started.required if name not in columns]:
        raise ProfileError(
            f"{started.name}: reset has the parameter {missing[0]!r} without a default, and the dataset has no such "
            f"column{did_you_mean(missing[0], columns)}; columns: {', '.join(sorted(columns))}"
        )


def episodes_in(
    started: StartedEnvironments,
    profile: Profile | EvaluationProfile,
    tokenizer: ChatTokenizer,
    context_length: int,
    *,
    in_rounds: bool = True,
) -> EnvironmentEpisodes:
    """Return the source of episodes. in_rounds: messages are sampled in rounds."""
    return EnvironmentEpisodes(
        started.limits,
        started.environments,
        ChatWriter(tokenizer, tools=started.tools, system=started.system),
        sampling=profile.sampling,
        context_length=context_length,
        in_rounds=in_rounds,
    )
