"""The checks of a start draw no completion; their findings are logged and written to preflight.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from clotho.models.tokenizer import ChatTokenizer
from protocols.finding import CHECK, Finding
from protocols.prompt import Problem
from protocols.summary import MemoryEstimate
from tests.training_run.built_context import open_context, tiny_profile
from training_run.profile.schema import Profile
from training_run.start.preflight import log_findings, write_findings

WARNING = Finding(name="few_problems", severity="warning", fact="a", consequence="b", advice="c", remedy=CHECK)
ERROR = replace(WARNING, name="model_unusable", severity="error")


def findings(_: Profile, estimate: MemoryEstimate) -> list[list[Finding]]:
    """Find something before the policy is loaded."""
    assert estimate.total > 0
    return [[WARNING]]


def findings_when_loaded(_: Profile, tokenizer: ChatTokenizer, problems: Sequence[Problem]) -> list[list[Finding]]:
    """Find something when it is loaded."""
    assert tokenizer.encode(problems[0].prompt)
    return [[ERROR]]


async def test_a_start_writes_the_findings_of_attachments_to_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors come first. The decode engine has sampled nothing."""
    monkeypatch.setattr("training_run.start.preflight.FINDINGS", findings)
    monkeypatch.setattr("training_run.start.preflight.FINDINGS_WHEN_LOADED", findings_when_loaded)
    async with open_context(tiny_profile(tmp_path)) as context:
        assert [finding.name for finding in context.start.findings] == ["model_unusable", "few_problems"]
        document = json.loads(context.directory.preflight.read_bytes())
        assert [finding["name"] for finding in document["findings"]] == ["model_unusable", "few_problems"]
        assert context.sampler.engine.stats().tokens_sampled == 0


def test_findings_are_logged_with_the_fields_that_they_have() -> None:
    """The terminal shows warnings."""
    with capture_logs() as events:
        log_findings([WARNING])
    (event,) = events
    assert event["remedy"]["action"] == "check"
    fields = {"finding": "few_problems", "severity": "warning", "fact": "a", "consequence": "b", "advice": "c"}
    assert {key: event[key] for key in event if key != "remedy"} == {
        "event": "finding", "log_level": "warning", "actor": "preflight", **fields,
    }  # fmt: skip


def test_a_disk_that_refuses_the_file_is_logged(tmp_path: Path) -> None:
    """The run continues."""
    with capture_logs() as events:
        write_findings(tmp_path / "none" / "preflight.json", (WARNING,))
    assert [event["event"] for event in events] == ["write_failed"]
