"""The replay buffer of a run, which adds groups to every update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clotho.settings.learner import BufferedReplay
from training_run.attachment import Attach, Attachment, Plan

if TYPE_CHECKING:
    from training_run.run import RunContext

NAME = "replay"


class ReplayAttachment(Attachment):
    """`[replay]` of a profile."""

    async def prepare(self, plan: Plan) -> Attach | None:
        """Continue with the groups of the checkpoint."""
        settings = plan.profile.replay
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


ATTACHMENT = ReplayAttachment()
