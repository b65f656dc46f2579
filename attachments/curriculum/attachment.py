"""What the curriculum adds to runs."""

from __future__ import annotations

from training_run.attachment import Attachment
from training_run.profile.rules import Rule


class CurriculumRuns(Attachment):
    """`data.curriculum` of a profile."""

    contradictions = (
        Rule(
            "data.curriculum.type",
            lambda v, x: x == "success_rate" and v.get("atropos.type", "off") != "off",
            '= "{}" contradicts atropos: environments choose their problems themselves',
        ),
        Rule(
            "data.curriculum.type",
            lambda v, x: (
                x == "success_rate"
                and any(a.mode == "replace" and a.at in ("prompter", "learner") for a in v["actors"])
            ),
            '= "{}" belongs to the built-in prompter and learner, and a custom actor replaces one of the two',
        ),
    )


ATTACHMENT = CurriculumRuns()
