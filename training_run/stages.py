"""Stages of a run: each continues from the last checkpoint of the one before, with other settings.

The learner begins anew in each stage: the state of its optimizer, its reference policy and its schedule. Weights,
random state and the count of groups continue. A run that goes from stage to stage therefore does what a run does that
is ended and resumed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from clotho.extension import Door
from training_run.directory.run_directory import RunDirectory, RunStage
from training_run.profile.load import Layer
from training_run.profile.schema import Profile


class StagePlan(Struct, frozen=True, kw_only=True):
    """Attachment -> start-up. settings: by key path, those of the stage alone. label: in error messages."""

    label: str
    steps: int
    settings: Mapping[str, Any]


STAGES: Door[[Profile], Sequence[StagePlan]] = Door("attachment.stages")
"""Returns the stages of a run, in order. Raises ProfileError."""


def stages_of(recorded: Profile, load: Callable[[Layer], Profile]) -> tuple[RunStage, ...]:
    """Return the stages of a run; none if it has one set of settings. load: the profile with a further layer.

    Raises ProfileError if the settings of a stage are not valid.
    """
    found: list[RunStage] = []
    for plan in (plan for plans in STAGES(recorded) for plan in plans):
        first = found[-1].profile.steps if found else 0
        profile = load(Layer(label=plan.label, values={**plan.settings, "steps": first + plan.steps}))
        found.append(RunStage(number=len(found) + 1, first_step=first, profile=profile, recorded=recorded))
    return tuple(found)


def remaining(stages: Sequence[RunStage], directory: RunDirectory) -> Sequence[RunStage]:
    """Return the stages that a run has not completed, and at least the last one. Raises CheckpointError."""
    from training_run.directory.checkpoints import latest_checkpoint, read_state  # imports MLX

    step = directory.resume_step or 0
    path = directory.fork or (latest_checkpoint(directory.checkpoints).path if directory.resumed else None)
    if directory.resume_step is None and path is not None:
        step = read_state(path).step
    return [stage for stage in stages if stage.profile.steps > step] or stages[-1:]


def planned_steps(profile: Profile) -> int:
    """Return the number of batches of a whole run. Raises ProfileError if the settings of a stage are not valid."""
    return sum(plan.steps for plans in STAGES(profile) for plan in plans) or profile.steps


def recorded_profile(profile: Profile, directory: RunDirectory) -> Profile:
    """Return the profile that the run directory keeps: that of the whole run. profile: of the present stage."""
    return directory.stage.recorded if directory.stage is not None else profile
