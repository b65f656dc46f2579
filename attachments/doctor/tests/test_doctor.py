"""The command `doctor` prints what it checked and what it found, and writes nothing but its output file."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from attachments.doctor import doctor
from attachments.doctor.completions import Completed
from attachments.machine import machine
from attachments.machine.tests import simulated_mac
from protocols.errors import ProfileError
from protocols.finding import Finding
from tests.training_run.built_context import tiny_profile
from training_run.profile.load import load_profile, resolved_toml


def console() -> tuple[Console, io.StringIO]:
    """A console of 200 columns, and what is printed."""
    out = io.StringIO()
    return Console(file=out, width=200), out


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str, Path]:
    """Exit status, JSON document and table of `doctor` for a model with random weights, and the directory of it all."""
    directory = tmp_path_factory.mktemp("doctor")
    profile = directory / "tiny.toml"
    profile.write_text(resolved_toml(tiny_profile(directory, eval="off"), mask_secrets=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "read_machine", lambda path, blas: simulated_mac.machine())
        screen, out = console()
        status = doctor.run(["--profile", str(profile), "--output", str(directory / "out.json")], screen)
    return status, json.loads((directory / "out.json").read_text()), out.getvalue(), directory


def test_a_model_with_random_weights_has_findings_and_status_1(
    diagnosed: tuple[int, dict[str, Any], str, Path],
) -> None:
    """All completions are truncated after four tokens. Parity, decode rate and the forecast are measured."""
    status, document, _, _ = diagnosed
    assert status == 1
    assert [finding["name"] for finding in document["findings"]] == ["all_truncated"]
    assert len(document["completions"]) == 16
    assert document["forecast"]["seconds"] > 0
    assert {"machine", "versions", "dataset", "memory", "template: end token", "parity", "forecast"} <= set(
        document["checks"]
    )


def test_the_table_has_every_check_and_the_advice_of_every_finding(
    diagnosed: tuple[int, dict[str, Any], str, Path],
) -> None:
    """And every completion with its reward and stop reason."""
    _, document, table, _ = diagnosed
    assert [subject for subject in document["checks"] if subject not in table] == []
    assert [finding["advice"] for finding in document["findings"] if finding["advice"] not in table] == []
    assert table.count(" -> ") >= len(document["completions"])


def test_a_terminal_without_unicode_shows_everything_and_errors_before_warnings() -> None:
    """What the terminal cannot write is replaced in the names of files, in findings and in completions."""
    found, finding = doctor.Diagnosis(), Finding(name="all_truncated", fact="später", consequence="", advice="")
    found.add("dataset", "prüfung.jsonl", [finding, replace(finding, severity="error")])
    found.completions = [Completed(prompt="wörter", completion="ja", reward=1.0, stop_reason="stop", turns=())]
    screen = Console(file=io.TextIOWrapper(out := io.BytesIO(), "ascii"), width=200)
    doctor.show(screen, found)
    screen.file.flush()
    lines = out.getvalue().decode().splitlines()
    assert [word for word in ("pr?fung.jsonl", "w?rter -> ja") if not any(word in line for line in lines)] == []
    assert [line.split()[0] for line in lines if "sp?ter" in line] == ["error:", "warning:"]


def test_nothing_is_written_but_the_output_file(diagnosed: tuple[int, dict[str, Any], str, Path]) -> None:
    """In particular no run directory."""
    *_, directory = diagnosed
    assert sorted(path.name for path in directory.iterdir()) == ["base", "out.json", "tiny.toml", "train.jsonl"]


@pytest.mark.parametrize(
    "flags",
    [["--profile", "no-such-profile"], ["--resume"], ["--output", "/"], ["--steps", "0"]],
    ids=["no profile", "flag without effect", "existing output", "wrong value"],
)
def test_bad_input_is_refused(flags: list[str]) -> None:
    """The exit status of a ProfileError is 2."""
    with pytest.raises(ProfileError) as refused:
        doctor.run(flags, console()[0])
    assert refused.value.exit_status == 2


def test_the_help_names_the_flags_of_the_command() -> None:
    """And the most used flags of a run."""
    screen, out = console()
    assert doctor.run(["--help"], screen) == 0
    assert all(flag in out.getvalue() for flag in ("--json", "--output", "--profile", "--model", "--server.port"))


def test_the_results_are_printed_as_json(tmp_path: Path) -> None:
    """A model that does not exist is a finding, and the other checks are listed."""
    base = tmp_path / "base"
    profile = tiny_profile(tmp_path)
    for file in base.iterdir():
        file.unlink()
    (tmp_path / "tiny.toml").write_text(resolved_toml(profile, mask_secrets=False))
    screen, out = console()
    assert doctor.run(["--profile", str(tmp_path / "tiny.toml"), "--json"], screen) == 1
    document = json.loads(out.getvalue())
    assert "model_unusable" in {finding["name"] for finding in document["findings"]}
    assert document["forecast"] is None
    assert tomllib.loads((tmp_path / "tiny.toml").read_text())["run_dir"]


async def test_the_system_does_not_sleep_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run, if `monitor.prevent_sleep` is on."""
    asked: list[bool] = []

    def ended(*, enabled: bool) -> None:
        asked.append(enabled)
        raise ProfileError("ended here")

    monkeypatch.setattr(doctor, "no_idle_sleep", ended)
    with pytest.raises(ProfileError, match="ended here"):
        await doctor.diagnose(load_profile("local-m3"), Console(quiet=True))
    assert asked == [True]
