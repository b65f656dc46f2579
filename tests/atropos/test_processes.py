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

from clotho.atropos import processes as module
from clotho.atropos.commands import Command
from clotho.atropos.processes import AtroposServer, Environment, ProcessActor, ProcessExit, ProcessLog
from clotho.config.load import load_profile
from protocols.errors import ActorError, ProfileError
from tests.atropos.atroposlib_python import python_with_atropos

PATIENCE_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXIT_POLICY", structs.replace(module.EXIT_POLICY, first_pause_seconds=0.0))


class ObservedProcess(ProcessActor):
    """One that is of use once it says `ready`; a test waits for lines, and reads what became of each life."""

    def __init__(self, directory: Path, text: str, **command: Any) -> None:
        argv = (sys.executable, "-c", text)
        made = Command(argv=argv, variables=dict(os.environ) | {"PYTHONUNBUFFERED": "1"}, **command)
        super().__init__("thing", made, ProcessLog(directory / "things" / "thing.log", secret=made.secret))
        self.exits: list[ProcessExit | None] = []
        self._send, self.lines = anyio.create_memory_object_stream[str](1000)

    def on_line(self, line: str) -> None:
        """Pass it on."""
        self.ready = self.ready or line == "ready"
        self._send.send_nowait(line)

    async def prepare(self) -> None:
        """Nothing to wait for."""
        self.report_started()

    async def clean_up(self, ended: ProcessExit | None) -> None:
        """Write it down."""
        self.exits.append(ended)

    def close(self) -> None:
        """Close what the test listened to."""
        self._send.close()
        self.lines.close()


async def failure(process: ObservedProcess) -> Exception:
    """How it gives up."""
    with anyio.fail_after(PATIENCE_SECONDS), pytest.raises((ProfileError, ActorError)) as caught:
        await process.run()
    process.close()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("text", ["import nowhere", "raise SystemExit(0)"])
async def test_what_cannot_work_is_said_at_once(text: str, tmp_path: Path) -> None:
    """It ended by itself, whatever its status, in its first life and before it was of use: its user must mend it."""
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


async def test_what_worked_is_started_again_and_given_up_in_the_end(tmp_path: Path) -> None:
    """A few failures in a row; a status of 0 is one, for it must serve as long as the run goes on."""
    process = ObservedProcess(tmp_path, "print('ready'); raise SystemExit(0)")
    error = await failure(process)
    assert isinstance(error, ActorError)
    assert error.exit_status == 1
    assert process.starts == len(process.exits) == module.FAILURE_POLICY.max_restarts + 1
    assert f"{module.FAILURE_POLICY.max_restarts + 1} times in a row" in str(error)


async def test_what_others_kill_is_started_again_more_often(tmp_path: Path) -> None:
    """Even before it was of use: nothing is wrong with it."""
    process = ObservedProcess(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    error = await failure(process)
    assert isinstance(error, ActorError)
    assert process.starts == module.EXIT_POLICY.max_restarts + 1
    assert "the process was ended by SIGKILL after" in str(error)


async def test_a_long_life_makes_up_for_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is started again without end."""
    stable = structs.replace(module.EXIT_POLICY, first_pause_seconds=0.0, stable_seconds=0.0)
    monkeypatch.setattr(module, "EXIT_POLICY", stable)
    process = ObservedProcess(tmp_path, "print('ready')")
    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(process.run)
            for _ in range(2 * module.FAILURE_POLICY.max_restarts):
                assert await process.lines.receive() == "ready"
            group.cancel_scope.cancel()
    process.close()


async def test_the_end_of_the_run_is_the_end_of_the_process(tmp_path: Path) -> None:
    """When the actor has been cancelled, nobody is left; that is no failure."""
    process = ObservedProcess(tmp_path, "import os, time; print(os.getpid()); time.sleep(3600)")
    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as group:
            await group.start(process.run)
            pid = int(await process.lines.receive())
            os.kill(pid, 0)
            group.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.exits == [None]
    process.close()


async def test_secrets_are_read_from_a_file_of_the_owners(tmp_path: Path) -> None:
    """While it lives; and what it prints of them is masked."""
    text = "import sys, time; print(open(sys.argv[1].partition('=')[2]).read()); time.sleep(3600)"
    process = ObservedProcess(tmp_path, text, settings={"openai": {"api_key": "s3cret:x"}}, secret="s3cret")
    path = tmp_path / "things" / "thing.json"
    with anyio.fail_after(PATIENCE_SECONDS):
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
from clotho.atropos.commands import Command
from clotho.atropos.processes import ProcessActor, ProcessLog
command = Command(argv=(sys.executable, "-c", sys.argv[1]), variables=dict(os.environ))
anyio.run(ProcessActor("thing", command, ProcessLog(Path(sys.argv[2]) / "thing.log")).run)
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


MISSING = "ModuleNotFoundError: No module named 'nowhere'"
TRACEBACK = b"""[transformers] something
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    import nowhere
ModuleNotFoundError: No module named 'nowhere'
"""


@pytest.fixture
def log(tmp_path: Path) -> ProcessLog:
    """One that is open."""
    opened = ProcessLog(tmp_path / "x.log", secret="s3cret")
    opened.open()
    return opened


def test_lines_are_kept_whole_however_they_arrive(log: ProcessLog) -> None:
    """Half a line waits for its other half; the last one for the end."""
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
        (b"\x1b[31mred\x07\n", "\xb7[31mred\xb7"),
        (b"x" * 500 + b"\n", "x" * 197 + "..."),
        (b"", ""),
    ],
)  # fmt: skip
def test_the_last_words_are_one_line_that_says_something(log: ProcessLog, printed: bytes, words: str) -> None:
    """An error with what follows it, else the last line; nothing that moves a cursor."""
    log.write(printed)
    assert log.error_line() == words


def test_the_file_does_not_grow_without_bound(log: ProcessLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """One old file is kept, and nothing is lost between the two."""
    monkeypatch.setattr(module, "LOG_FILE_BYTES", 100)
    for number in range(100):
        log.write(f"line {number}\n".encode())
    log.close()
    old, new = log.path.with_name("x.log.1"), log.path
    assert sorted(path.name for path in log.path.parent.iterdir()) == ["x.log", "x.log.1"]
    assert max(old.stat().st_size, new.stat().st_size) <= 100
    kept = (old.read_text() + new.read_text()).splitlines()
    assert kept == [f"line {number}" for number in range(100)][-len(kept) :]


def test_a_line_without_an_end_does_not_grow_without_bound(log: ProcessLog) -> None:
    """It is broken."""
    lines = [line for _ in range(5) for line in log.write(b"x" * module.LINE_BYTES)]
    assert [len(line) for line in lines] == [module.LINE_BYTES] * 4


def test_only_the_owner_reads_it_and_secrets_are_masked(log: ProcessLog) -> None:
    """Settings are printed by others at their start."""
    log.write(b"api_key='s3cret:arithmetic'\n")
    log.close()
    assert log.path.read_text() == "api_key='********:arithmetic'\n"
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


def test_a_new_life_begins_without_the_last_words_of_the_old_one(log: ProcessLog) -> None:
    """The file goes on."""
    log.write(b"ImportError: x\n")
    log.open()
    assert log.error_line() == ""
    log.write(b"fine\n")
    log.close()
    assert log.path.read_text() == "ImportError: x\nfine\n"


START_TIMEOUT_SECONDS = 240.0
POLICY_URL = "http://127.0.0.1:9"

IDLE = '''
"""An environment that registers, and has nothing to do."""
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
    """An environment whose lines a test can wait for."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._send, self.lines = anyio.create_memory_object_stream[str](10_000)

    def on_line(self, line: str) -> None:
        """Pass it on."""
        super().on_line(line)
        self._send.send_nowait(line)

    async def number(self, pattern: str) -> int:
        """The number in the next line that has one."""
        while True:
            if match := re.match(pattern, await self.lines.receive()):
                return int(match[1])

    def close(self) -> None:
        """Close what the test listened to."""
        self._send.close()
        self.lines.close()


class ServerAndEnvironment:
    """A server with an environment in it, and a trainer's requests."""

    def __init__(self, directory: Path, script: Path) -> None:
        section = {"name": "mine", "script": str(script), "min_batch_allocation": 0.5}
        overrides = {"atropos.python": python_with_atropos(), "environments": [section]}
        profile = load_profile("atropos-local", overrides)
        self.server = AtroposServer(profile, directory=directory)
        self.environment = ObservedEnvironment(
            profile.environments[0],
            profile,
            server_url=self.server.url,
            server_starts=lambda: self.server.starts,
            policy_url=POLICY_URL,
            directory=directory,
        )
        self.client = httpx.AsyncClient(base_url=self.server.url, trust_env=False)

    async def register_trainer(self) -> None:
        """As a trainer does; environments may come from its first look on."""
        await self.client.post("/register", json=REGISTRATION)
        await self.client.get("/batch")

    async def unallocated(self, number: int) -> float:
        """The share of a batch that nobody who is connected reserves."""
        answer = await self.client.request("GET", "/status-env", json={"env_id": number})
        return float(answer.json()["unallocated_fraction"])


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The idle environment, or another text."""
    path = tmp_path / "idle.py"
    path.write_text(getattr(request, "param", IDLE), encoding="utf-8")
    return path


async def test_killed_processes_come_back_and_are_ended_with_the_run(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of the environment: another takes its place on the server's books. SIGKILL of the server: it answers at
    the same address, and the environment registers anew. In the end nobody is left.
    """
    monkeypatch.setattr(module, "EXIT_POLICY", structs.replace(module.EXIT_POLICY, first_pause_seconds=0.0))
    running = ServerAndEnvironment(tmp_path / "atropos", script)
    async with AsyncExitStack() as ends:
        ends.callback(running.environment.close)
        await ends.enter_async_context(running.client)
        with anyio.fail_after(START_TIMEOUT_SECONDS):
            async with anyio.create_task_group() as group:
                await group.start(running.server.run)
                await running.register_trainer()
                await group.start(running.environment.run)
                pid = await running.environment.number(r"pid (\d+)")
                assert await running.environment.number(r"Initialized env with id (\d+)") == 0
                assert await running.unallocated(0) == 0.5

                os.kill(pid, signal.SIGKILL)
                assert await running.environment.number(r"Initialized env with id (\d+)") == 1
                assert await running.unallocated(1) == 0.5, "the dead one keeps its share"

                os.kill(_server_pid(tmp_path), signal.SIGKILL)
                await running.environment.number(r"pid (\d+)")
                await running.register_trainer()
                assert await running.environment.number(r"Initialized env with id (\d+)") == 0
                assert (running.server.starts, running.environment.starts) == (2, 3)
                group.cancel_scope.cancel()
        with pytest.raises(httpx.ConnectError):
            await running.client.get("/")


def _server_pid(directory: Path) -> int:
    """As it says itself."""
    log = (directory / "atropos" / "api-server.log").read_text(encoding="utf-8")
    return int(re.findall(r"Started server process \[(\d+)\]", log)[-1])


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        (IDLE.replace('print("pid"', 'raise ValueError("no data'), "SyntaxError"),
        (IDLE.replace("async def setup(self):", "async def setup(self):\n        1 / 0"), "ZeroDivisionError"),
    ],
    ids=["import", "syntax", "setup"],
    indirect=["script"],
)
async def test_a_script_that_cannot_work_ends_the_run(tmp_path: Path, script: Path, says: str) -> None:
    """At its first start, with its error on one line: that is for its author to mend."""
    running = ServerAndEnvironment(tmp_path / "atropos", script)
    async with AsyncExitStack() as ends:
        ends.callback(running.environment.close)
        await ends.enter_async_context(running.client)
        with anyio.fail_after(START_TIMEOUT_SECONDS):
            async with anyio.create_task_group() as group:
                await group.start(running.server.run)
                with pytest.raises(ProfileError, match=says) as caught:
                    await running.environment.run()
                group.cancel_scope.cancel()
    assert "\n" not in str(caught.value)
    assert f"{tmp_path}/atropos/mine.log); after correcting it" in str(caught.value)


async def test_an_environment_waits_for_its_server(tmp_path: Path, script: Path) -> None:
    """Which may come later: atroposlib's own would end."""
    running = ServerAndEnvironment(tmp_path / "atropos", script)
    async with AsyncExitStack() as ends:
        ends.callback(running.environment.close)
        await ends.enter_async_context(running.client)
        with anyio.fail_after(START_TIMEOUT_SECONDS):
            async with anyio.create_task_group() as group:
                await group.start(running.environment.run)
                await anyio.wait_all_tasks_blocked()
                assert running.environment.starts == 0
                await group.start(running.server.run)
                await running.environment.number(r"pid (\d+)")
                await running.register_trainer()
                assert await running.environment.number(r"Initialized env with id (\d+)") == 0
                group.cancel_scope.cancel()
