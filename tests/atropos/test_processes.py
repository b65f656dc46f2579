"""The real processes: atroposlib's API server and environments, killed and brought back."""

from __future__ import annotations

import os
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from clotho.atropos import process as module
from clotho.atropos.processes import AtroposServer, Environment
from clotho.config.load import load_profile
from protocols.errors import ProfileError
from tests.atropos.counterpart import python_with_atropos

PATIENCE_SECONDS = 240.0
GATEWAY = "http://127.0.0.1:9"

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


class Observed(Environment):
    """An environment whose lines a test can wait for."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._send, self.lines = anyio.create_memory_object_stream[str](10_000)

    def heard(self, line: str) -> None:
        """Pass it on."""
        super().heard(line)
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


class Scene:
    """A server with an environment in it, and a trainer's requests."""

    def __init__(self, directory: Path, script: Path) -> None:
        section = {"name": "mine", "script": str(script), "min_batch_allocation": 0.5}
        overrides = {"atropos.python": python_with_atropos(), "environments": [section]}
        profile = load_profile("atropos-local", overrides)
        self.server = AtroposServer(profile, directory=directory)
        self.environment = Observed(
            profile.environments[0],
            profile,
            server_url=self.server.url,
            server_lives=lambda: self.server.lives,
            gateway_url=GATEWAY,
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
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)
    scene = Scene(tmp_path / "atropos", script)
    async with AsyncExitStack() as ends:
        ends.callback(scene.environment.close)
        await ends.enter_async_context(scene.client)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as group:
                await group.start(scene.server.run)
                await scene.register_trainer()
                await group.start(scene.environment.run)
                pid = await scene.environment.number(r"pid (\d+)")
                assert await scene.environment.number(r"Initialized env with id (\d+)") == 0
                assert await scene.unallocated(0) == 0.5

                os.kill(pid, signal.SIGKILL)
                assert await scene.environment.number(r"Initialized env with id (\d+)") == 1
                assert await scene.unallocated(1) == 0.5, "the dead one keeps its share"

                os.kill(_server_pid(tmp_path), signal.SIGKILL)
                await scene.environment.number(r"pid (\d+)")
                await scene.register_trainer()
                assert await scene.environment.number(r"Initialized env with id (\d+)") == 0
                assert (scene.server.lives, scene.environment.lives) == (2, 3)
                group.cancel_scope.cancel()
        with pytest.raises(httpx.ConnectError):
            await scene.client.get("/")


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
    scene = Scene(tmp_path / "atropos", script)
    async with AsyncExitStack() as ends:
        ends.callback(scene.environment.close)
        await ends.enter_async_context(scene.client)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as group:
                await group.start(scene.server.run)
                with pytest.raises(ProfileError, match=says) as caught:
                    await scene.environment.run()
                group.cancel_scope.cancel()
    assert "\n" not in str(caught.value)
    assert f"{tmp_path}/atropos/mine.log); with --clean" in str(caught.value)


async def test_an_environment_waits_for_its_server(tmp_path: Path, script: Path) -> None:
    """Which may come later: atroposlib's own would end."""
    scene = Scene(tmp_path / "atropos", script)
    async with AsyncExitStack() as ends:
        ends.callback(scene.environment.close)
        await ends.enter_async_context(scene.client)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as group:
                await group.start(scene.environment.run)
                await anyio.wait_all_tasks_blocked()
                assert scene.environment.lives == 0
                await group.start(scene.server.run)
                await scene.environment.number(r"pid (\d+)")
                await scene.register_trainer()
                assert await scene.environment.number(r"Initialized env with id (\d+)") == 0
                group.cancel_scope.cancel()
