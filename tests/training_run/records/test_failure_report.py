"""A failure is one line on stderr; the traceback of an unexpected error is in a file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from protocols.errors import ActorError, ClothoError, ProfileError
from training_run.records.failure_report import COMPLAINT_LIMIT, OUT_OF_MEMORY, report


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Return an error with a traceback."""
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_a_mistake_of_the_user_is_one_line_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2. The event log is unchanged."""
    assert report(raised(ProfileError("steps must be >= 1"), ValueError()), log=tmp_path / "log.jsonl") == 2
    assert capsys.readouterr().err == "clotho: steps must be >= 1\n"
    assert not list(tmp_path.iterdir())


def test_the_traceback_of_an_unexpected_error_is_appended_to_the_event_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1. The line names the file. Further errors are notes of the first, one line each."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"event":"earlier"}\n')
    error = raised(ActorError("actor 'learner' failed"), raised(KeyError("cause"), OSError("first cause")))
    error.add_note("actor 'scorer' failed too")
    assert report(error, log=log) == 1
    line, note = capsys.readouterr().err.splitlines()
    assert line.startswith("clotho: actor 'learner' failed")
    assert str(log) in line
    assert note == "  actor 'scorer' failed too"
    _, event = map(json.loads, log.read_text().splitlines())
    assert (event["level"], event["event"]) == ("critical", "run_failed")
    for part in ("Traceback", "KeyError: 'cause'", "OSError: first cause", __file__):
        assert part in event["exception"]


@pytest.mark.parametrize("text", ["", "Unable to allocate 8 GiB"])
def test_memory_that_the_system_refuses_is_no_internal_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """The line says what can be done, with the text of the error if it has one."""
    log = tmp_path / "log.jsonl"
    log.touch()
    assert report(raised(MemoryError(text)), log=log) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"clotho: {OUT_OF_MEMORY}")
    assert text in line


@pytest.mark.parametrize(
    "error", [RecursionError("x"), ExceptionGroup("g", [ValueError()]), SystemExit(3), UnprintableError()]
)
def test_without_an_event_log_a_temporary_file_has_the_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """As for an error during start-up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert report(raised(error), log=tmp_path / "log.jsonl") == 1
    [line] = capsys.readouterr().err.splitlines()
    [file] = tmp_path.iterdir()
    assert str(file) in line
    assert type(error).__name__ in line
    assert type(error).__name__ in file.read_text()


def test_without_any_file_the_traceback_is_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be lost. It cannot contain terminal escapes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert report(raised(ValueError("\x1b[2J")), log=None) == 1
    first, *trace = capsys.readouterr().err.splitlines()
    assert first.startswith("clotho: internal error: ValueError")
    assert "Traceback" in trace[0]
    assert not any("\x1b" in line for line in trace)


def test_a_long_message_keeps_its_beginning_and_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The end says what to do."""
    assert report(ClothoError("begin " + "x" * 1_000_000 + " end")) == 1
    line = capsys.readouterr().err.removesuffix("\n")
    assert len(line) == COMPLAINT_LIMIT
    assert line.startswith("clotho: begin")
    assert line.endswith("end")
