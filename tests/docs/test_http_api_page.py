"""docs/http-api.md: every code block runs against a server, and the table of metrics is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from attachments.ranks.tests import test_metrics as ranks
from attachments.remote.tests import test_place as remote
from attachments.sessions.tests import test_metrics as sessions
from attachments.tinker.tests import test_metrics as tinker
from tests import test_engine_metrics
from tests.serving import test_metrics as server
from tests.serving.running_server import serving
from tests.training_run.records import test_run_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    command
    for language, block in BLOCKS
    if language == "sh"
    for command in re.findall(r"^curl(?:[^\n]*\\\n)*[^\n]*", block, re.MULTILINE)
]
PROGRAMS = [block for language, block in BLOCKS if language == "python"]


async def output(*command: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = await anyio.run_process(command, stderr=subprocess.STDOUT, check=False, env=os.environ | {"NO_PROXY": "*"})
    assert done.returncode == 0, done.stdout.decode()
    return done.stdout.decode()


def test_every_block_is_a_curl_command_or_a_program() -> None:
    """The tests below run all of them."""
    assert {language for language, _ in BLOCKS} == {"sh", "python", "text"}
    lines = [block for language, block in BLOCKS if language == "sh"]
    assert "".join(lines).split() == " ".join(COMMANDS).split()


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_curl_command_succeeds(command: str) -> None:
    """curl fails for every HTTP status that is an error."""
    async with serving() as served:
        fail = command.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
        assert await output("bash", "-c", fail.replace("http://localhost:8000", served.url))


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_prints_the_version_of_the_weights(program: str) -> None:
    """OpenAI's client passes the additional fields through."""
    async with serving() as served:
        printed = await output(sys.executable, "-c", program.replace("http://localhost:8000", served.url))
        assert printed.splitlines()[-1] == "{'first': 3, 'last': 3}"


def test_the_table_contains_every_metric_with_its_type() -> None:
    """Names and types are those that /metrics returns."""
    table = PAGE[PAGE.index("## Metrics") :]
    rows = re.findall(r"^\| (`[^|]+`) \| (\w+) \|", table, re.MULTILINE)
    listed = {name: kind for names, kind in rows for name in re.findall(r"`([^`]+)`", names)}
    tested = (server, test_engine_metrics, test_run_metrics, ranks, remote, sessions, tinker)
    metrics = {name: kind for module in tested for name, kind in module.METRICS.items() if name != "clotho_measured"}
    assert listed == metrics | {"clotho_child_restarts": "counter", "clotho_log_events_lost": "counter"}
