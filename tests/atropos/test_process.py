"""A process that is kept alive: started again, given up in time, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from clotho.atropos import process as module
from clotho.atropos.commands import Command
from clotho.atropos.process import KeptProcess, Life, Output
from protocols.errors import ActorError, ProfileError

PATIENCE_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)


class Kept(KeptProcess):
    """One that is of use once it says `ready`; a test waits for lines, and reads what became of each life."""

    def __init__(self, directory: Path, text: str, **command: Any) -> None:
        argv = (sys.executable, "-c", text)
        made = Command(argv=argv, variables=dict(os.environ) | {"PYTHONUNBUFFERED": "1"}, **command)
        super().__init__("thing", made, Output(directory / "things" / "thing.log", secret=made.secret))
        self.buried: list[Life | None] = []
        self._send, self.lines = anyio.create_memory_object_stream[str](1000)

    def heard(self, line: str) -> None:
        """Pass it on."""
        self.worked = self.worked or line == "ready"
        self._send.send_nowait(line)

    async def prepare(self) -> None:
        """Nothing to wait for."""
        self.ready()

    async def bury(self, life: Life | None) -> None:
        """Write it down."""
        self.buried.append(life)

    def close(self) -> None:
        """Close what the test listened to."""
        self._send.close()
        self.lines.close()


async def failure(kept: Kept) -> Exception:
    """How it gives up."""
    with anyio.fail_after(PATIENCE_SECONDS), pytest.raises((ProfileError, ActorError)) as caught:
        await kept.run()
    kept.close()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("text", ["import nowhere", "raise SystemExit(0)"])
async def test_what_cannot_work_is_said_at_once(text: str, tmp_path: Path) -> None:
    """It ended by itself, whatever its status, in its first life and before it was of use: its user must mend it."""
    kept = Kept(tmp_path, text)
    error = await failure(kept)
    assert error.exit_status == 2  # type: ignore[attr-defined]
    assert isinstance(error, ProfileError)
    assert kept.lives == 1
    if "nowhere" in text:
        assert "it ended with exit status 1 after" in str(error)
        assert ", before it was ready: ModuleNotFoundError: No module named 'nowhere'" in str(error)
    assert str(error).endswith(f"(all it printed: {tmp_path}/things/thing.log); with --clean the run begins anew")


async def test_what_worked_is_started_again_and_given_up_in_the_end(tmp_path: Path) -> None:
    """A few failures in a row; a status of 0 is one, for it must serve as long as the run goes on."""
    kept = Kept(tmp_path, "print('ready'); raise SystemExit(0)")
    error = await failure(kept)
    assert isinstance(error, ActorError)
    assert error.exit_status == 1
    assert kept.lives == len(kept.buried) == module.MOST_FAILURES
    assert f"the {module.MOST_FAILURES}th time in a row" in str(error)


async def test_what_others_kill_is_started_again_more_often(tmp_path: Path) -> None:
    """Even before it was of use: nothing is wrong with it."""
    kept = Kept(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    error = await failure(kept)
    assert isinstance(error, ActorError)
    assert kept.lives == module.MOST_DEATHS
    assert "it was ended by SIGKILL after" in str(error)


async def test_a_long_life_makes_up_for_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is started again without end."""
    monkeypatch.setattr(module, "SHORT_SECONDS", 0.0)
    kept = Kept(tmp_path, "print('ready')")
    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(kept.run)
            for _ in range(2 * module.MOST_FAILURES):
                assert await kept.lines.receive() == "ready"
            group.cancel_scope.cancel()
    kept.close()


async def test_the_end_of_the_run_is_the_end_of_the_process(tmp_path: Path) -> None:
    """When the actor has been cancelled, nobody is left; that is no failure."""
    kept = Kept(tmp_path, "import os, time; print(os.getpid()); time.sleep(3600)")
    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as group:
            await group.start(kept.run)
            pid = int(await kept.lines.receive())
            os.kill(pid, 0)
            group.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert kept.buried == [None]
    kept.close()


async def test_secrets_are_read_from_a_file_of_the_owners(tmp_path: Path) -> None:
    """While it lives; and what it prints of them is masked."""
    text = "import sys, time; print(open(sys.argv[1].partition('=')[2]).read()); time.sleep(3600)"
    kept = Kept(tmp_path, text, settings={"openai": {"api_key": "s3cret:x"}}, secret="s3cret")
    path = tmp_path / "things" / "thing.json"
    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as group:
            await group.start(kept.run)
            assert await kept.lines.receive() == '{"openai":{"api_key":"********:x"}}'
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            group.cancel_scope.cancel()
    assert not path.exists()
    assert "s3cret" not in path.with_name("thing.log").read_text()
    kept.close()


RUN = """
import os, sys
from pathlib import Path
import anyio
from clotho.atropos.commands import Command
from clotho.atropos.process import Output
from clotho.atropos.process import KeptProcess
command = Command(argv=(sys.executable, "-c", sys.argv[1]), variables=dict(os.environ))
anyio.run(KeptProcess("thing", command, Output(Path(sys.argv[2]) / "thing.log")).run)
"""


def test_when_the_run_is_killed_its_processes_end(tmp_path: Path) -> None:
    """SIGKILL of the trainer: what holds a connection to us lets go of it, as the dead do."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        port = listener.getsockname()[1]
        holds = f"import socket, time; one = socket.create_connection(('127.0.0.1', {port})); time.sleep(3600)"
        repository = Path(module.__file__).parents[2]
        run = subprocess.Popen([sys.executable, "-c", RUN, holds, str(tmp_path)], cwd=repository)
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE_SECONDS)
                run.send_signal(signal.SIGKILL)
                assert connection.recv(1) == b""
        finally:
            run.kill()
            run.wait()
