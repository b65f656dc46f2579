"""Checks of a profile before its run: by the command `doctor`, and those without a completion at each start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from protocols.finding import Finding
from training_run.profile.rules import has_own_groups

if TYPE_CHECKING:
    from clotho.models.tokenizer import ChatTokenizer
    from protocols.prompt import Problem
    from training_run.profile.schema import Profile


COMMANDS: Mapping[str, str] = {"doctor": "attachments.doctor.doctor"}


def findings_when_loaded(profile: Profile, tokenizer: ChatTokenizer, problems: Sequence[Problem]) -> Iterable[Finding]:
    """Yield what will not work, or not as meant."""
    from attachments.doctor.problems import problem_findings
    from attachments.doctor.template import check_template, template_use
    from attachments.doctor.versions import installed_versions, setting_findings, version_findings

    yield from version_findings(installed_versions())
    yield from setting_findings(profile)
    yield from check_template(tokenizer, template_use(profile, problems)).findings
    if has_own_groups(profile):
        yield from problem_findings(problems, profile.rewards, batch_size=profile.learner.batch_size)
