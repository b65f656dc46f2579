"""The curriculum by success rate in a run: it chooses the problem of every group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attachments.curriculum.sections import CURRICULUM, SuccessRateCurriculum
from training_run.profile.rules import Rule
from training_run.records.terminal_text import share

if TYPE_CHECKING:
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


METRICS: Mapping[str, str] = {
    "curriculum/zero_variance_expected": "Probability that all or none of a group's completions succeed, predicted "
    "when its problem was chosen; mean over the scored groups of the step; null without a curriculum.",
    "curriculum/zero_variance_observed": "Share of these groups whose rewards are all equal.",
    "curriculum/success_rate": "Mean success rate of the last groups of all problems; null without a curriculum.",
    "curriculum/problems": "Number of problems by the success rate of their last group, in five intervals; for "
    "problems without a group, the mean of their type. Null without a curriculum.",
}

CONTRADICTIONS = (
    Rule(
        "data.curriculum.type",
        lambda v, x: (
            x == "success_rate" and any(a.mode == "replace" and a.at in ("prompter", "learner") for a in v["actors"])
        ),
        '= "{}" belongs to the built-in prompter and learner, and a custom actor replaces one of the two',
    ),
)


def slots(profile: Profile) -> Mapping[str, str]:
    """The chooser of problems."""
    chooses = isinstance(CURRICULUM.of(profile.data), SuccessRateCurriculum)
    return {"chooser": 'data.curriculum = "success_rate"'} if chooses else {}


async def prepare(plan: Plan) -> Attach | None:
    """Continue with the evidence of the checkpoint, if it is of these problems."""
    settings = CURRICULUM.of(plan.profile.data)
    if not isinstance(settings, SuccessRateCurriculum):
        return None

    async def attach(run: RunContext) -> None:
        """Make the curriculum, with the evidence of the checkpoint, and let it choose the problems."""
        from attachments.curriculum.curriculum import NAME, Curriculum, take_part
        from attachments.curriculum.group_outcomes import SavedCurriculum
        from training_run.groups.prompts import problems_fingerprint

        problems = run.prompts.problems
        saved = run.attached.parts.saved(NAME, SavedCurriculum)
        curriculum = Curriculum(
            [problem.type for problem in problems],
            run.prompts.order,
            settings,
            seed=run.profile.seed,
            dataset=problems_fingerprint(problems),
            saved=saved.value if saved else None,
        )
        take_part(run.attached, curriculum)

    return attach


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Yield the observed and the expected share of zero-variance groups."""
    observed, expected = (line.get(f"curriculum/zero_variance_{kind}") for kind in ("observed", "expected"))
    if expected is not None:
        yield f"zero variance {share(observed)} ({share(expected)} expected)"
