"""`restarts` of a profile: a run of one process is continued after its process was ended, for example by Metal."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from attachments.restarts.sections import RESTARTS
from protocols.errors import ProfileError

if TYPE_CHECKING:
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


MAY_CHANGE = ("restarts",)


def check(profile: Profile) -> None:
    """Refuse the setting for ranks, whose supervisors have one of their own."""
    if RESTARTS.of(profile) and "MLX_RANK" in os.environ:
        raise ProfileError("restarts: mlx.launch has started this process; distributed.restarts is for its ranks")


def supervise(profile: Profile) -> None:
    """Make this process the supervisor of the run, unless it has one."""
    if not (restarts := RESTARTS.of(profile)):
        return
    from attachments.restarts.supervision import CONNECTION, become_supervisor

    if CONNECTION not in os.environ:
        become_supervisor(restarts)


async def prepare(plan: Plan) -> Attach | None:
    """Tell the supervisor how long turns are, and from when on the run can be resumed.

    A new run can be as soon as its directory has any file. One that deletes or forks another is started afresh
    until it has begun.
    """
    if not RESTARTS.of(plan.profile):
        return None
    from attachments.restarts.supervision import CONNECTION
    from training_run.supervision.restarting import SupervisorLink

    if CONNECTION not in os.environ:
        return None
    link = SupervisorLink(CONNECTION, on_end=lambda: os.kill(os.getpid(), signal.SIGTERM))
    directory = plan.directory
    link.tell(turn_ms=plan.profile.learner.max_turn_ms)
    if not directory.clean and directory.fork is None:
        link.tell(run_directory=str(directory.path))

    async def attach(run: RunContext) -> None:
        """From now on, the run directory has the run."""
        link.tell(run_directory=str(run.directory.path))

    return attach
