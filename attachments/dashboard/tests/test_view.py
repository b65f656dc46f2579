"""`pipeline.py view` shows runs on a server, or writes one file, and changes nothing in a run directory."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from attachments.dashboard import view
from attachments.dashboard.run_files import is_live
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from clotho.settings.server import HttpServer
from training_run.__main__ import main
from training_run.directory.run_directory import open_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small run."""
    return write_run(tmp_path_factory.mktemp("view") / "run", RunShape(groups=4, steps=2, token_steps=0))


def contents(directory: Path) -> dict[str, bytes]:
    """Return all files of a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_file_is_written_once(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing file is not replaced. The run directory stays as it was."""
    before = contents(run)
    assert main(["view", str(run), "--export", str(tmp_path / "run.html")]) == 0
    assert "4 of 4" in capsys.readouterr().out
    assert (tmp_path / "run.html").stat().st_size > 10_000
    assert main(["view", str(run), "--export", str(tmp_path / "run.html")]) == 2
    assert contents(run) == before


@pytest.mark.parametrize(
    "words",
    [
        [], ["nowhere"], ["."], ["RUN", "nowhere"], ["RUN", "--server.port", "70000"], ["RUN", "--server.port", "x"],
        ["RUN", "--server.host", "0.0.0.0"], ["RUN", "--export", "nowhere/a.html"], ["RUN", "--unknown"],
        ["RUN", "--export", "a.html", "--export-mb", "-1"], ["a\0b"],
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_one_line(
    run: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 2."""
    monkeypatch.chdir(tmp_path)
    assert main(["view", *(str(run) if word == "RUN" else word for word in words)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_misspelled_run_is_suggested(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runs beside the path are known."""
    assert main(["view", f"{run}x"]) == 2
    assert str(run) in capsys.readouterr().err


def test_the_page_is_served_until_a_signal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit status 0. A request that waits is answered."""
    answers = list[int]()
    listeners = list[socket.socket]()
    original = view.bound

    def bound(settings: HttpServer, *, chosen: bool) -> socket.socket:
        listeners.append(original(settings, chosen=chosen))
        return listeners[0]

    monkeypatch.setattr(view, "bound", bound)

    def browse() -> None:
        try:
            url = f"http://127.0.0.1:{listeners[0].getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=20) as client:
                answers.append(client.get("/dashboard/api/runs/0/about").status_code)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    browser = threading.Thread(target=browse)

    def screen(_: Sequence[Path], __: str) -> list[str]:
        browser.start()
        return []

    monkeypatch.setattr(view, "screen", screen)
    assert main(["view", str(run), "--server.port", "0"]) == 0
    browser.join()
    assert answers == [200]


def test_a_run_is_live_while_a_process_owns_its_directory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after its end, and not if the process id belongs to a later process."""
    assert not is_live(run)
    owner = open_run(run, resume=True, clean=False)
    assert is_live(run)
    os.utime(run / ".lock", (0, 0))
    assert not is_live(run)
    os.utime(run / ".lock")
    monkeypatch.setattr(psutil, "Process", lambda _: (_ for _ in ()).throw(psutil.NoSuchProcess(1)))
    assert not is_live(run)
    owner.close()
    assert not is_live(run)
