"""The checks of every start that need no completion."""

from __future__ import annotations

from pathlib import Path

from attachments.doctor import attachment
from attachments.doctor.tests import templates
from tests.training_run.built_context import tiny_profile
from training_run.groups.prompts import read_split
from training_run.profile.load import load_profile


def test_settings_and_problems_are_examined(tmp_path: Path) -> None:
    """With the tokenizer of the model. The profile has an unusual scale and few problems."""
    profile = tiny_profile(tmp_path, policy={"method": {"scale": 1000.0}}, learner={"batch_size": 64})
    (tmp_path / "train.jsonl").write_text('{"prompt": "1?", "answer": "1", "type": "echo"}\n' * 20)
    found = attachment.findings_when_loaded(profile, templates.embedded(), read_split(profile).train)
    assert [finding.name for finding in found] == ["lora_scale_unusual", "few_problems"]


def test_the_embedded_profile_has_no_finding() -> None:
    """Its template, its settings and its problems are as meant."""
    profile = load_profile("local-m3")
    assert list(attachment.findings_when_loaded(profile, templates.embedded(), read_split(profile).train)) == []
