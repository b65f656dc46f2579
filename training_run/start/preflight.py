"""The checks at the start of a run: silent, cheap, and without a completion; only findings are logged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from clotho.extension import Door
from clotho.models.tokenizer import ChatTokenizer
from clotho.storage.atomic_files import replace_file
from protocols.finding import Finding
from protocols.prompt import Problem
from protocols.summary import MemoryEstimate
from training_run.directory.jsonl import encode
from training_run.profile.schema import Profile
from training_run.records.event_log import log_finding
from training_run.supervision.custom_actors import load_factory

log = structlog.get_logger(actor="preflight")


class PreflightReport(Struct, frozen=True, kw_only=True):
    """The content of preflight.json."""

    findings: tuple[Finding, ...]


FINDINGS: Door[[Profile, MemoryEstimate], Iterable[Finding]] = Door("attachment.findings")
"""Examines machine and profile, with the memory of the run."""

FINDINGS_WHEN_LOADED: Door[[Profile, ChatTokenizer, Sequence[Problem]], Iterable[Finding]] = Door(
    "attachment.findings_when_loaded"
)
"""Examines what has been loaded, without a completion: the tokenizer, and the problems for training."""


def start_findings(
    profile: Profile, tokenizer: ChatTokenizer, problems: Sequence[Problem], estimate: MemoryEstimate
) -> tuple[Finding, ...]:
    """Return the findings of all attachments, errors first. estimate: memory of the run."""
    found = chain(*FINDINGS(profile, estimate), *FINDINGS_WHEN_LOADED(profile, tokenizer, problems))
    return tuple(sorted(found, key=lambda finding: finding.severity != "error"))


def log_findings(findings: Iterable[Finding]) -> None:
    """Log findings, which the terminal shows too."""
    for finding in findings:
        log_finding(finding, actor="preflight")


def write_findings(path: Path, findings: tuple[Finding, ...]) -> None:
    """Write preflight.json. A disk that refuses is logged, because the run does not need the file."""
    report = PreflightReport(findings=findings)
    try:
        replace_file(path, [msgspec.json.format(encode(report, terminal_safe=True), indent=1), b"\n"])
    except OSError as error:
        log.warning("write_failed", file=path.name, error=error.strerror or str(error))


def require_importable(profile: Profile) -> None:
    """Import custom actors and the objective. Raises ProfileError."""
    for section in profile.actors:
        load_factory(section)
    from clotho.training.objectives.functions import objective  # imports MLX

    objective(profile.learner.objective)
