"""The unpatched SDK: its messages, every public method, and GRPO."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from attachments.tinker.proto import MESSAGES, message_class
from attachments.tinker.tests.tinker_server import Live, tinker_server

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tinker.md"
pytestmark = pytest.mark.needs_extra("tinker-sdk")


def client_program(*arguments: str) -> str:
    """Return the output of a program that uses the SDK, which leaves connections and threads behind."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-W", "ignore", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of the embedded policy."""
    with tinker_server(ROOT / "profiles" / "embedded", tmp_path_factory.mktemp("sdk")) as live:
        yield live


def test_the_messages_are_those_of_the_sdk() -> None:
    """Numbers, names and types of every field that is read or written. Images are read as bytes, to refuse them."""
    from tinker.proto import tinker_public_pb2

    for name in MESSAGES:
        theirs = {one.name: one for one in getattr(tinker_public_pb2, name).DESCRIPTOR.fields}
        for own in message_class(name).DESCRIPTOR.fields:
            other = theirs[own.name]
            assert own.number == other.number
            if own.name not in ("image", "dmel"):
                assert own.type == other.type
                assert own.is_repeated == other.is_repeated


def test_the_page_says_how_every_method_is_answered(live: Live) -> None:
    """The table has a column for each SDK that was tried."""
    column = {"0.38": 1, "0.34": 2}[".".join(version("tinker").split(".")[:2])]
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    page = {cells[0]: cells[column] for line in lines if len(cells := line.strip("| ").split(" | ")) == 3}
    printed = client_program("-m", "attachments.tinker.tests.methods", live.url).splitlines()
    found = dict(line.strip("| ").split(" | ") for line in printed)
    assert "served" in found.values()
    assert {name: page[name] for name in found} == found


def test_the_example_runs(live: Live) -> None:
    """One step of GRPO, with few held-out problems."""
    output = client_program("attachments/tinker/examples/grpo.py", live.url, "1", "8")
    assert [line.split(":")[0] for line in output.splitlines()] == ["step 0", "step 1"]
