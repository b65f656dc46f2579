"""The replay buffer of a run, which adds groups to every update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attachments.replay.sections import REPLAY, BufferedReplay
from training_run.profile.rules import Rule

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan

NAME = "replay"


CONTRADICTIONS = (
    Rule(
        "replay.groups",
        lambda v, x: x > v["replay.capacity"],
        "= {} must be at most replay.capacity = {v[replay.capacity]}",
    ),
)
METRICS: Mapping[str, str] = {"groups/replayed": "Number of groups from the replay buffer; null without one."}


def memory(need: MemoryNeed) -> None:
    """Let updates train on more groups."""
    if need.profile is not None and isinstance(settings := REPLAY.of(need.profile), BufferedReplay):
        need.groups += settings.groups


async def prepare(plan: Plan) -> Attach | None:
    """Continue with the groups of the checkpoint."""
    settings = REPLAY.of(plan.profile)
    if not isinstance(settings, BufferedReplay):
        return None

    async def attach(run: RunContext) -> None:
        from attachments.replay.replay import Replay, ReplayBuffer, ReplayState

        saved = run.attached.parts.saved(NAME, ReplayState)
        groups = saved.value.groups if saved else ()
        replay = Replay(ReplayBuffer(settings, seed=run.profile.seed, kept=groups))
        run.attached.hooks.append(replay)
        run.attached.parts.save(NAME, replay.part)

    return attach
