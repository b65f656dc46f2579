"""Tasksets of verifiers in a run: the policy acts in their environments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attachments.verifiers.sections import TASKSET, VERIFIERS, VerifiersSection
from training_run.episodes.attachment import (
    ends_messages,
    episode_metrics,
    episodes_of,
    prepare_episodes,
)
from training_run.profile.generators import Generator
from training_run.profile.rules import Complaint, Rule, Values

if TYPE_CHECKING:
    from contextlib import ExitStack

    from training_run.commands.evaluate import MakeEpisodes
    from training_run.episodes.started import StartedEnvironments
    from training_run.memory.need import MemoryNeed
    from training_run.profile.command_profiles import EvaluationProfile
    from training_run.profile.schema import Profile
    from training_run.start.startup import Attach, Plan


KEYS = " ".join(f"{TASKSET.path}.{name}" for name in VerifiersSection.__struct_fields__)
"""The keys of the table."""


def _plays(v: Values) -> bool:
    """Whether a resolved profile names a taskset."""
    return bool(v["data.train"].startswith(VERIFIERS))


NO_EFFECT = (
    Rule(KEYS, lambda v, _: not _plays(v), "data.train is not verifiers:TASKSET", "data.train"),
    Rule("data.system", lambda v, _: _plays(v), "a task brings its own system message", "data.train"),
)
CONTRADICTIONS = (
    ends_messages('data.train = "verifiers:"', _plays),
    Rule(
        "data.heldout data.heldout_split",
        lambda v, x: bool(x) and (_plays(v) or x.startswith(VERIFIERS)),
        "= {} is not possible with a taskset of verifiers: data.heldout_fraction holds out tasks of data.train",
    ),
)
MAY_CHANGE = ("data.verifiers.python", "data.verifiers.memory_limit_mb", "data.verifiers.step_seconds")
GENERATORS: Mapping[str, Generator] = {
    VERIFIERS: Generator(
        open="attachments.verifiers.tasks:opened",
        weights="attachments.verifiers.tasks:epoch_weights",
        rewards=({"name": "environment", "correct": True},),
    )
}
PREFIX = "verifiers"
METRICS: Mapping[str, str] = episode_metrics(PREFIX)


def slots(profile: Profile) -> Mapping[str, str]:
    """What an episode is."""
    return {"episodes": f'data.train = "{profile.data.train}"'} if _taskset(profile) else {}


def complaints(profile: Profile) -> Iterable[Complaint]:
    """A taskset has a name."""
    if profile.data.train == VERIFIERS:
        yield Complaint("data.train", f"data.train must be {VERIFIERS}TASKSET, with the name of a taskset")


def check(profile: Profile) -> None:
    """Raise ProfileError unless the interpreter of the taskset exists."""
    if _taskset(profile):
        from attachments.verifiers.tasks import require_python

        require_python(profile.data)


def memory(need: MemoryNeed) -> None:
    """Episodes are sequences of which any part may be sampled."""
    if need.profile is not None and _taskset(need.profile):
        need.sequence_tokens = TASKSET.of(need.profile.data).max_tokens


async def _environments(profile: Profile | EvaluationProfile, ending: ExitStack) -> StartedEnvironments | None:
    """Start the process that plays tasks."""
    if not _taskset(profile):
        return None
    from attachments.verifiers.player import TasksetPlayer
    from attachments.verifiers.tasks import require_python
    from training_run.episodes.messages import EpisodeLimits
    from training_run.episodes.started import StartedEnvironments

    require_python(profile.data)
    settings = TASKSET.of(profile.data)
    player = TasksetPlayer(profile.data)
    ending.callback(player.close)
    await player.start()
    limits = EpisodeLimits(max_turns=settings.max_turns, max_tokens=settings.max_tokens)
    return StartedEnvironments(environments=player, limits=limits)


def _taskset(profile: Profile | EvaluationProfile) -> bool:
    return profile.data.train.startswith(VERIFIERS)


async def prepare(plan: Plan) -> Attach | None:
    """Start the environments of a run."""
    return await prepare_episodes(_environments, plan, PREFIX)


async def evaluated(profile: EvaluationProfile, ending: ExitStack) -> MakeEpisodes | None:
    """Start the environments of `eval`."""
    return await episodes_of(_environments, profile, ending)
