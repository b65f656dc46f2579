"""The checks of a start draw no completion; their findings are logged and written to preflight.json."""

from __future__ import annotations

import json
from pathlib import Path

from structlog.testing import capture_logs

from attachments.doctor.start import PreflightReport, log_findings, start_findings, write_report
from attachments.doctor.tests import templates
from attachments.machine.tests.simulated_mac import machine
from protocols.finding import CHECK, Finding
from tests.training_run.built_context import open_context, tiny_profile
from training_run.groups.prompts import read_split
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import load_profile

WARNING = Finding(name="few_problems", severity="warning", fact="a", consequence="b", advice="c", remedy=CHECK)


async def test_a_start_writes_its_findings_to_the_run_directory(tmp_path: Path) -> None:
    """Errors come first. The decode engine has sampled nothing."""
    profile = tiny_profile(tmp_path, policy={"method": {"scale": 1000.0}}, learner={"batch_size": 64})
    (tmp_path / "train.jsonl").write_text('{"prompt": "1?", "answer": "1", "type": "echo"}\n' * 20)
    async with open_context(profile) as context:
        assert [finding.name for finding in context.preflight] == ["lora_scale_unusual", "few_problems"]
        document = json.loads(context.directory.preflight.read_bytes())
        assert [finding["name"] for finding in document["findings"]] == ["lora_scale_unusual", "few_problems"]
        assert document["forecast"] is None
        assert context.engine.stats().tokens_sampled == 0


def test_the_embedded_profile_has_no_finding() -> None:
    """On a machine with enough of everything."""
    profile = load_profile("local-m3")
    estimate = estimate_memory(profile.model, profile)
    tokenizer = templates.embedded()
    found = start_findings(profile, tokenizer, read_split(profile).train, estimate, machine=machine())
    assert found == ()


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
        write_report(tmp_path / "none" / "preflight.json", PreflightReport(findings=(WARNING,)))
    assert [event["event"] for event in events] == ["write_failed"]
