"""The checks at the start of a run: silent, cheap, and without a completion; only problems are logged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from attachments.doctor.problems import problem_findings
from attachments.doctor.settings import setting_findings
from attachments.doctor.template import TemplateUse, check_template
from attachments.doctor.versions import installed_versions, version_findings
from attachments.machine.machine import MachineState, RunNeeds, disk_needed, machine_findings, read_machine
from clotho.models.machine import backend_name
from clotho.models.tokenizer import ChatTokenizer
from clotho.process import load_blas
from clotho.rewards.registry import expects_tag
from clotho.settings.bounds import Off
from clotho.storage.atomic_files import replace_file
from clotho.storage.json_text import encode
from protocols.finding import Finding
from protocols.prompt import Problem
from protocols.summary import MemoryEstimate
from training_run.profile.schema import Profile
from training_run.records.event_log import log_finding

log = structlog.get_logger(actor="preflight")


class Forecast(Struct, frozen=True, kw_only=True):
    """Estimated duration of a run, from a rehearsal.

    seconds: from the first prompt to the end. seconds_per_step: decoding and update of a batch. evaluation_seconds: all
    evaluations. longest_turn_seconds: longest turn of the learner. seconds_least, seconds_most: limits of `seconds`,
    because the number of groups without variance changes while the policy learns: updates leave such groups out, or
    dynamic sampling replaces them.
    """

    seconds: float
    seconds_least: float
    seconds_most: float
    seconds_per_step: float
    decode_tokens_per_second: float
    update_seconds: float
    evaluation_seconds: float
    longest_turn_seconds: float


class PreflightReport(Struct, frozen=True, kw_only=True):
    """The content of preflight.json. forecast: None without a rehearsal."""

    findings: tuple[Finding, ...]
    forecast: Forecast | None = None


def start_findings(
    profile: Profile,
    tokenizer: ChatTokenizer,
    problems: Sequence[Problem],
    estimate: MemoryEstimate,
    *,
    machine: MachineState | None = None,
) -> tuple[Finding, ...]:
    """Return the findings of all checks that need no completion, errors first.

    estimate: memory of the run. machine: its state; None reads it.
    """
    state = machine or read_machine(Path(profile.run_dir), blas=load_blas())
    found = _findings(profile, tokenizer, problems, state, needs_of(profile, estimate))
    return tuple(sorted(found, key=lambda finding: finding.severity != "error"))


def _findings(
    profile: Profile, tokenizer: ChatTokenizer, problems: Sequence[Problem], state: MachineState, needs: RunNeeds
) -> Iterator[Finding]:
    yield from machine_findings(state, needs)
    yield from version_findings(installed_versions())
    yield from setting_findings(profile)
    own = isinstance(profile.atropos, Off)
    yield from check_template(tokenizer, template_use(profile, problems)).findings
    if own:
        yield from problem_findings(problems, profile.rewards, batch_size=profile.learner.batch_size)


def needs_of(profile: Profile, estimate: MemoryEstimate) -> RunNeeds:
    """Return what the run of a profile needs of the machine."""
    return RunNeeds(
        memory_bytes=estimate.total,
        disk_bytes=disk_needed(estimate, profile.checkpoint.keep_last),
        max_turn_ms=profile.learner.max_turn_ms,
        uses_gpu=backend_name() != "CPU",
    )


def template_use(profile: Profile, problems: Sequence[Problem]) -> TemplateUse:
    """Return how the run of a profile uses the chat template."""
    environments = not isinstance(profile.atropos, Off)
    answered = any(message.get("role") == "assistant" for problem in problems for message in problem.messages)
    tools = [] if environments else [problem.tools for problem in problems if problem.tools]
    return TemplateUse(
        rewards=() if environments else tuple(reward.name for reward in profile.rewards if expects_tag(reward)),
        several_turns=environments or answered,
        stop_token_ids=profile.sampling.stop_token_ids,
        tools=tools[0] if tools else (),
        problems=len(problems),
        with_tools=len(tools),
    )


def log_findings(findings: Iterable[Finding]) -> None:
    """Log findings, which the terminal shows too."""
    for finding in findings:
        log_finding(finding, actor="preflight")


def write_report(path: Path, report: PreflightReport) -> None:
    """Write preflight.json. A disk that refuses is logged, because the run does not need the file."""
    try:
        replace_file(path, [msgspec.json.format(encode(report, terminal_safe=True), indent=1), b"\n"])
    except OSError as error:
        log.warning("write_failed", file=path.name, error=error.strerror or str(error))
