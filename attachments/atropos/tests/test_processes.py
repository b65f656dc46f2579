"""Processes of Atropos: logs, restarts, and the real API server and environments."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from msgspec import structs

from attachments.atropos import processes as module
from attachments.atropos.commands import Command, interpreter
from attachments.atropos.processes import AtroposServer, Environment, ProcessActor, ProcessExit, ProcessLog
from attachments.atropos.sections import ENVIRONMENTS
from attachments.atropos.tests.atroposlib_python import python_with_atropos
from protocols.errors import ActorError, ProfileError
from training_run.profile.load import load_profile

TIMEOUT_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    few = structs.replace(
        module.EXIT_POLICY, first_pause_seconds=0.0, max_restarts=module.FAILURE_POLICY.max_restarts + 2
    )
    monkeypatch.setattr(module, "EXIT_POLICY", few)


class ObservedProcess(ProcessActor):
    """A process that is ready when it prints `ready`. lines: its output. exits: how each run ended."""

    def __init__(self, directory: Path, text: str, **command: Any) -> None:
        argv = (sys.executable, "-S", "-c", text)
        made = Command(argv=argv, variables=dict(os.environ) | {"PYTHONUNBUFFERED": "1"}, **command)
        super().__init__("thing", made, ProcessLog(directory / "things" / "thing.log", secret=made.secret))
        self.exits: list[ProcessExit | None] = []
        self._send, self.lines = anyio.create_memory_object_stream[str](1000)

    def on_line(self, line: str) -> None:
        """Pass the line to the test."""
        self.ready = self.ready or line == "ready"
        self._send.send_nowait(line)

    async def prepare(self) -> None:
        """Report the start immediately."""
        self.report_started()

    async def clean_up(self, ended: ProcessExit | None) -> None:
        """Record the exit."""
        self.exits.append(ended)

    def close(self) -> None:
        """Close the stream of lines."""
        self._send.close()
        self.lines.close()


async def failure(process: ObservedProcess) -> Exception:
    """Run the process until it raises an error, and return the error."""
    with anyio.fail_after(TIMEOUT_SECONDS), pytest.raises((ProfileError, ActorError)) as caught:
        await process.run()
    process.close()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("text", ["import nowhere", "raise SystemExit(0)"])
async def test_an_exit_before_the_process_was_ever_ready_is_an_error(text: str, tmp_path: Path) -> None:
    """In the first run, with any exit status; the user has to correct the command."""
    process = ObservedProcess(tmp_path, text)
    error = await failure(process)
    assert error.exit_status == 2  # type: ignore[attr-defined]
    assert isinstance(error, ProfileError)
    assert process.starts == 1
    if "nowhere" in text:
        assert "the process exited with status 1 after" in str(error)
        assert ", before it was ready: ModuleNotFoundError: No module named 'nowhere'" in str(error)
    assert str(error).endswith(
        f"(output: {tmp_path}/things/thing.log); after correcting it, start the run with --clean"
    )


async def test_a_process_that_was_ready_restarts_a_limited_number_of_times(tmp_path: Path) -> None:
    """Exit status 0 is a failure too, because the process must run as long as the run."""
    process = ObservedProcess(tmp_path, "print('ready'); raise SystemExit(0)")
    error = await failure(process)
    assert isinstance(error, ActorError)
    assert error.exit_status == 1
    assert process.starts == len(process.exits) == module.FAILURE_POLICY.max_restarts + 1
    assert f"{module.FAILURE_POLICY.max_restarts + 1} times in a row" in str(error)


async def test_a_killed_process_restarts_more_often(tmp_path: Path) -> None:
    """Even if it was never ready."""
    process = ObservedProcess(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    error = await failure(process)
    assert isinstance(error, ActorError)
    assert process.starts == module.EXIT_POLICY.max_restarts + 1
    assert "the process was ended by SIGKILL after" in str(error)


async def test_a_stable_run_resets_the_failure_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process then restarts without a limit."""
    stable = structs.replace(module.EXIT_POLICY, first_pause_seconds=0.0, stable_seconds=0.0)
    monkeypatch.setattr(module, "EXIT_POLICY", stable)
    process = ObservedProcess(tmp_path, "print('ready')")
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(process.run)
            for _ in range(2 * module.FAILURE_POLICY.max_restarts):
                assert await process.lines.receive() == "ready"
            group.cancel_scope.cancel()
    process.close()


async def test_cancellation_ends_the_process(tmp_path: Path) -> None:
    """The process has ended when the cancellation returns; this is not an exit of its own."""
    process = ObservedProcess(tmp_path, "import os, time; print(os.getpid()); time.sleep(3600)")
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with anyio.create_task_group() as group:
            await group.start(process.run)
            pid = int(await process.lines.receive())
            os.kill(pid, 0)
            group.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.exits == [None]
    process.close()


async def test_secrets_are_passed_in_a_file_and_masked_in_the_log(tmp_path: Path) -> None:
    """Only the owner can read the file, which is removed when the process ends."""
    text = "import sys, time; print(open(sys.argv[1].partition('=')[2]).read()); time.sleep(3600)"
    process = ObservedProcess(tmp_path, text, settings={"openai": {"api_key": "s3cret:x"}}, secret="s3cret")
    path = tmp_path / "things" / "thing.json"
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with anyio.create_task_group() as group:
            await group.start(process.run)
            assert await process.lines.receive() == '{"openai":{"api_key":"********:x"}}'
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            group.cancel_scope.cancel()
    assert not path.exists()
    assert "s3cret" not in path.with_name("thing.log").read_text()
    process.close()


RUN = """
import os, sys
from pathlib import Path
import anyio
from attachments.atropos.commands import Command
from attachments.atropos.processes import ProcessActor, ProcessLog
command = Command(argv=(sys.executable, "-c", sys.argv[1]), variables=dict(os.environ))
anyio.run(ProcessActor("thing", command, ProcessLog(Path(sys.argv[2]) / "thing.log")).run)
"""


def test_processes_end_when_the_trainer_is_killed(tmp_path: Path) -> None:
    """SIGKILL. The end of the process closes its connection to the test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_SECONDS)
        port = listener.getsockname()[1]
        holds = f"import socket, time; one = socket.create_connection(('127.0.0.1', {port})); time.sleep(3600)"
        repository = Path(module.__file__).parents[2]
        run = subprocess.Popen([sys.executable, "-c", RUN, holds, str(tmp_path)], cwd=repository)
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(TIMEOUT_SECONDS)
                run.send_signal(signal.SIGKILL)
                assert connection.recv(1) == b""
        finally:
            run.kill()
            run.wait()


MISSING = "ModuleNotFoundError: No module named 'nowhere'"
TRACEBACK = b"""[transformers] something
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    import nowhere
ModuleNotFoundError: No module named 'nowhere'
"""


@pytest.fixture
def log(tmp_path: Path) -> ProcessLog:
    """Return an open log."""
    opened = ProcessLog(tmp_path / "x.log", secret="s3cret")
    opened.open()
    return opened


def test_partial_lines_are_joined(log: ProcessLog) -> None:
    """The last partial line is written when the log closes."""
    assert log.write(b"one\ntw") == ["one"]
    assert log.write(b"o\r\nthr") == ["two"]
    log.write(b"ee")
    log.close()
    log.close()
    assert log.path.read_text() == "one\ntwo\nthree\n"
    assert log.error_line() == "three"


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (TRACEBACK, MISSING),
        (TRACEBACK + b"Help: install it\n", f"{MISSING} Help: install it"),
        (b"all is well\n-----\n\n", "all is well"),
        (b"\x1b[31mred\x07\n", "\\x1b[31mred\\x07"),
        (b"x" * 500 + b"\n", "x" * 197 + "..."),
        (b"", ""),
    ],
)  # fmt: skip
def test_the_error_line_is_the_last_line_with_text(log: ProcessLog, printed: bytes, words: str) -> None:
    """Or the exception of a traceback and the lines after it. Control characters are escaped."""
    log.write(printed)
    assert log.error_line() == words


def test_the_log_file_is_rotated(log: ProcessLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """One old file is kept; no line between the two files is lost."""
    monkeypatch.setattr(module, "LOG_FILE_BYTES", 100)
    for number in range(100):
        log.write(f"line {number}\n".encode())
    log.close()
    old, new = log.path.with_name("x.log.1"), log.path
    assert sorted(path.name for path in log.path.parent.iterdir()) == ["x.log", "x.log.1"]
    assert max(old.stat().st_size, new.stat().st_size) <= 100
    kept = (old.read_text() + new.read_text()).splitlines()
    assert kept == [f"line {number}" for number in range(100)][-len(kept) :]


def test_a_long_line_is_split(log: ProcessLog) -> None:
    """A line without an end does not use unlimited memory."""
    lines = [line for _ in range(5) for line in log.write(b"x" * module.LINE_BYTES)]
    assert [len(line) for line in lines] == [module.LINE_BYTES] * 4


def test_the_log_file_is_private_and_secrets_are_masked(log: ProcessLog) -> None:
    """Environments print their settings at the start."""
    log.write(b"api_key='s3cret:arithmetic'\n")
    log.close()
    assert log.path.read_text() == "api_key='********:arithmetic'\n"
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_restart_clears_the_error_line(log: ProcessLog) -> None:
    """The file is continued."""
    log.write(b"ImportError: x\n")
    log.open()
    assert log.error_line() == ""
    log.write(b"fine\n")
    log.close()
    assert log.path.read_text() == "ImportError: x\nfine\n"


START_TIMEOUT_SECONDS = 240.0
POLICY_URL = "http://127.0.0.1:9"

IDLE = '''
"""An environment that registers and produces no groups."""
import os
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

class Idle(BaseEnv):
    name = "idle"
    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), [APIServerConfig()]
    async def setup(self):
        print("pid", os.getpid(), flush=True)
    async def get_next_item(self):
        return None
    async def evaluate(self): ...

if __name__ == "__main__":
    Idle.cli()
'''

REGISTRATION = {
    "wandb_group": "", "wandb_project": "", "batch_size": 128, "max_token_len": 256, "checkpoint_dir": "",
    "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 60,
}  # fmt: skip


class ObservedEnvironment(Environment):
    """An environment whose output a test can read."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._send, self.lines = anyio.create_memory_object_stream[str](10_000)

    def on_line(self, line: str) -> None:
        """Pass the line to the test."""
        super().on_line(line)
        self._send.send_nowait(line)

    async def number(self, pattern: str) -> int:
        """Return the number in the next line that matches."""
        while True:
            if match := re.match(pattern, await self.lines.receive()):
                return int(match[1])

    def close(self) -> None:
        """Close the stream of lines."""
        self._send.close()
        self.lines.close()


class ServerAndEnvironment:
    """An API server, the idle environment, and a client that registers a trainer."""

    def __init__(self, directory: Path) -> None:
        script = directory.with_name("idle.py")
        section = {"name": "mine", "script": str(script), "min_batch_allocation": 0.5}
        overrides = {"atropos.python": python_with_atropos(), "environments": [section]}
        self._profile, self._directory, self._script = load_profile("atropos-local", overrides), directory, script
        self.server = AtroposServer(interpreter(self._profile), directory=directory)
        self.environment = self.make_environment(IDLE)
        self.client = httpx.AsyncClient(base_url=self.server.url, trust_env=False)

    def make_environment(self, text: str) -> ObservedEnvironment:
        """Return the environment of the profile with this script. It has not started."""
        self._script.write_text(text, encoding="utf-8")
        return ObservedEnvironment(
            ENVIRONMENTS.of(self._profile)[0],
            self._profile,
            server_url=self.server.url,
            server_starts=lambda: self.server.starts,
            policy_url=POLICY_URL,
            directory=self._directory,
        )

    async def register_trainer(self) -> None:
        """Register a trainer and poll once; environments can register afterwards."""
        await self.client.post("/register", json=REGISTRATION)
        await self.client.get("/batch")

    async def unallocated(self, number: int) -> float:
        """Return the share of a batch that no connected environment reserves."""
        answer = await self.client.request("GET", "/status-env", json={"env_id": number})
        return float(answer.json()["unallocated_fraction"])


@pytest.mark.needs_extra("atroposlib")
async def test_killed_processes_restart_and_end_with_the_run(tmp_path: Path) -> None:
    """An environment waits for the API server, because atroposlib would exit without one.

    A killed environment is disconnected from the server and registers again. A killed server restarts at the same
    address, and the environment registers again.
    """
    running = ServerAndEnvironment(tmp_path / "atropos")
    async with AsyncExitStack() as ends:
        ends.callback(running.environment.close)
        await ends.enter_async_context(running.client)
        with anyio.fail_after(START_TIMEOUT_SECONDS):
            async with anyio.create_task_group() as group:
                await group.start(running.environment.run)
                await anyio.wait_all_tasks_blocked()
                assert running.environment.starts == 0
                await group.start(running.server.run)
                await running.register_trainer()
                pid = await running.environment.number(r"pid (\d+)")
                assert await running.environment.number(r"Initialized env with id (\d+)") == 0
                assert await running.unallocated(0) == 0.5

                os.kill(pid, signal.SIGKILL)
                assert await running.environment.number(r"Initialized env with id (\d+)") == 1
                assert await running.unallocated(1) == 0.5, "the killed environment keeps its share"

                os.kill(_server_pid(tmp_path), signal.SIGKILL)
                await running.environment.number(r"pid (\d+)")
                await running.register_trainer()
                assert await running.environment.number(r"Initialized env with id (\d+)") == 0
                assert (running.server.starts, running.environment.starts) == (2, 3)
                group.cancel_scope.cancel()
        with pytest.raises(httpx.ConnectError):
            await running.client.get("/")


def _server_pid(directory: Path) -> int:
    """Return the process ID that the server has printed."""
    log = (directory / "atropos" / "api-server.log").read_text(encoding="utf-8")
    return int(re.findall(r"Started server process \[(\d+)\]", log)[-1])


FAILING = {
    "import nowhere": "ModuleNotFoundError: No module named 'nowhere'",
    IDLE.replace('print("pid"', 'raise ValueError("no data'): "SyntaxError",
    IDLE.replace("async def setup(self):", "async def setup(self):\n        1 / 0"): "ZeroDivisionError",
}
"""Scripts, each with the exception at its start."""


@pytest.mark.needs_extra("atroposlib")
async def test_a_script_that_fails_at_its_first_start_ends_the_run(tmp_path: Path) -> None:
    """The error contains the exception of the script on one line."""
    running = ServerAndEnvironment(tmp_path / "atropos")
    running.environment.close()
    errors = []
    async with running.client:
        with anyio.fail_after(START_TIMEOUT_SECONDS):
            async with anyio.create_task_group() as group:
                await group.start(running.server.run)
                for text in FAILING:
                    environment = running.make_environment(text)
                    with pytest.raises(ProfileError) as caught:
                        await environment.run()
                    environment.close()
                    errors.append(str(caught.value))
                group.cancel_scope.cancel()
    for error, says in zip(errors, FAILING.values(), strict=True):
        assert says in error
        assert "\n" not in error
        assert f"{tmp_path}/atropos/mine.log); after correcting it" in error
