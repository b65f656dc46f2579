"""`[[stages]]` of a profile: one run, one adapter, and several kinds of training one after another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attachments.stages.sections import STAGE, STAGES, StageSection
from clotho.settings.objectives import Sft
from protocols.errors import ProfileError
from training_run.profile.rules import PREFERENCES, Complaint, Rule

if TYPE_CHECKING:
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.stages import StagePlan
    from training_run.start.startup import Attach, Plan

FIXED = ("model", "policy", "seed", "run_dir", "steps", "stages", "stage")
"""Tables and keys that are the same in all stages."""

OBJECTIVE = "learner.objective.type"
TEACHER, WEIGHT = "distillation.teacher", "learner.distillation_weight"

OBJECTIVES: Mapping[str, Sequence[str]] = {"sft": ("sft",), "preference": PREFERENCES}
"""The objectives of a kind of stage, of which the first is its default."""


NO_EFFECT = (
    Rule("steps", lambda v, _: bool(v["stages"]), "every one of [[stages]] has steps of its own", "stages"),
    Rule("stage", lambda v, _: not v["stages"], "no [[stages]] are listed"),
)
METRICS: Mapping[str, str] = {"stages/stage": "Number of the stage of the run, from 1; null in a run without stages."}


def complaints(profile: Profile) -> Iterable[Complaint]:
    """Refuse a choice without stages, and reinforcement learning with the objective of demonstrations."""
    found, chosen = STAGES.of(profile), STAGE.of(profile)
    if found and chosen != "all" and all(one.kind != chosen for one in found):
        yield Complaint("stage", f'stage = "{chosen}" is the kind of none of [[stages]]')
    if isinstance(profile.learner.objective, Sft) and any(one.kind == "rl" for one in found):
        yield Complaint(OBJECTIVE, 'learner.objective = "sft" is that of stages of the kind sft, and one is rl')


def may_differ(key: str, old: Profile, new: Profile) -> bool:
    """The last stage may become longer or shorter."""
    return key == f"stages.{len(STAGES.of(new)) - 1}.steps"


def stages(profile: Profile) -> Sequence[StagePlan]:
    """Return the chosen stages."""
    found, chosen = STAGES.of(profile), STAGE.of(profile)
    return [_plan(number, one, profile) for number, one in enumerate(found) if chosen in ("all", one.kind)]


async def prepare(plan: Plan) -> Attach | None:
    """Record the number of the stage."""
    stage = plan.directory.stage
    if stage is None:
        return None

    async def attach(run: RunContext) -> None:
        """Add it to every line of metrics.jsonl."""
        run.attached.measures.append(lambda _: {"stages/stage": stage.number})

    return attach


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Yield the number of the stage."""
    if (number := line.get("stages/stage")) is not None:
        yield f"stage {number}"


def _plan(number: int, stage: StageSection, profile: Profile) -> StagePlan:
    """Return the settings of a stage by key path. Held-out problems stay. Raises ProfileError."""
    from training_run.profile.load import flatten, located
    from training_run.stages import StagePlan

    label = f"stages[{number}]"
    values = located(flatten(stage.settings, label), Path.cwd(), label)
    if fixed := [key for key in values if key.partition(".")[0] in FIXED]:
        raise ProfileError(f"{label}: {fixed[0]} is the same in all stages: set it outside of them")
    objective = values.get(OBJECTIVE, profile.learner.objective.__struct_config__.tag)
    if of_kind := OBJECTIVES.get(stage.kind, ()):
        if OBJECTIVE not in values and objective not in of_kind:
            objective = values[OBJECTIVE] = of_kind[0]
        if objective not in of_kind:
            raise ProfileError(f'{label}: kind = "{stage.kind}" and {OBJECTIVE} = "{objective}" contradict each other')
    if objective in PREFERENCES:
        values.setdefault("preference.pairs", "dataset" if stage.kind == "preference" else "rewards")
    _decide_teacher(values, stage, profile, label)
    if stage.data:
        values = {"data.heldout": profile.data.heldout, **values, "data.train": stage.data}
    return StagePlan(label=label, steps=stage.steps, settings={**values, "stages": [], "stage": "all"})


def _decide_teacher(values: dict[str, Any], stage: StageSection, profile: Profile, label: str) -> None:
    """Let a stage of the kind `distill` learn from its teacher, and other stages from none unless they name one.

    Raises ProfileError.
    """
    section = getattr(profile, "distillation", None)  # of an attachment
    if stage.kind != "distill":
        if section is not None:
            values.setdefault(TEACHER, "")
        return
    values.setdefault(WEIGHT, profile.learner.distillation_weight or 1.0)
    if not values.setdefault(TEACHER, "" if section is None else section.teacher):
        raise ProfileError(f'{label}: kind = "distill" needs {TEACHER}, in the profile or in the settings of the stage')
