"""Fifty agents at once, which are killed, and whose run is killed: every session is accounted for once."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from attachments.sessions.tests import plain_agent
from tests.docs.test_commands import free_port, is_ready
from tests.e2e.pipeline_process import FEW_PROBLEMS, Run, assert_recorded, metrics, resume_flag
from training_run.directory.checkpoints import latest_checkpoint, read_state

AGENTS = 50
PATIENCE_SECONDS = 3600.0
"""Upper limit of a start of the run, which shares the processors with the agents. No assertion depends on it."""

FLAGS = (
    "--profile", "local-m3", "--sessions", "http", "--sampling.group-size", "4", "--learner.batch-size", "4",
    "--checkpoint.interval", "1", "--eval", "off", *FEW_PROBLEMS,
)  # fmt: skip
BALANCE = re.compile(r"^sessions +begun (\d+) = trained (\d+) \+ discarded (\d+) \+ carried over (\d+)", re.MULTILINE)
MARKER = re.compile(r"Ann has (\d{9}) coins")


class Note(Struct, frozen=True, array_like=True):
    """A line of an agent."""

    what: str
    marker: str
    receipt: str
    reward: float


class Agents:
    """The processes of the agents, and what they have written. The `with` block kills them at its end."""

    def __init__(self, directory: Path, port: int, stack: ExitStack) -> None:
        self._directory, self._port = directory, port
        self._begun = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        stack.callback(self._end)
        for _ in range(AGENTS):
            self.begin()

    def begin(self) -> None:
        """Begin one more agent."""
        arguments = (str(self._port), str(self._begun), str(self._directory / f"{self._begun}.jsonl"))
        command = [sys.executable, "-S", plain_agent.__file__, *arguments]
        self.processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        self._begun += 1

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill one agent, and begin another in its place."""
        process.kill()
        process.wait()
        self.processes.remove(process)
        self.begin()

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def notes(self) -> list[Note]:
        """Return what all agents have written, without a last line that was cut."""
        found = "".join(path.read_text(encoding="utf-8") for path in sorted(self._directory.iterdir()))
        return [msgspec.json.decode(line, type=Note) for line in found.splitlines() if line.endswith("]")]


def recorded(run_dir: Path, *, steps: int) -> dict[str, float]:
    """Return the rewards of the sessions that groups of these first steps contain; each is in one of them."""
    whole = [
        line for line in (run_dir / "rollouts.jsonl").read_text(encoding="utf-8").splitlines(True) if line[-1] == "\n"
    ]
    groups = [group for group in map(json.loads, whole) if group["step"] <= steps]
    pairs = [
        (marker, completion["reward"])
        for group in groups
        for completion in group["completions"]
        for marker in MARKER.findall(completion["text"])
    ]
    found = dict(pairs)
    assert len(found) == len(pairs), "no session is in two groups"
    return found


def saved_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    found = latest_checkpoint(run_dir / "checkpoints").path
    return read_state(found).step if found else 0


def started(run_dir: Path, *flags: str) -> Run:
    """Start the run, or resume it."""
    return Run(run_dir, *flags, *resume_flag(run_dir), small=(), patience_seconds=PATIENCE_SECONDS)


def killed_agents(directory: Path, *, kills: int, seed: int) -> dict[str, object]:
    """Kill the run or an agent at random moments, let the run end, and check every promise. Returns what happened."""
    moments, run_dir, notes = random.Random(seed), directory / "run", directory / "notes"
    notes.mkdir()
    port, happened = free_port(), Counter[str]()
    flags = (*FLAGS, "--server.port", str(port))
    kept: dict[str, float] = {}
    with ExitStack() as stack:
        agents = Agents(notes, port, stack)
        left = kills
        while left:
            before = saved_step(run_dir)
            with started(run_dir, *flags, "--steps", "1000") as running:
                running.wait_until(lambda: is_ready(port))
                of_agents = min(left - 1, moments.randint(0, 6))
                for _ in range(of_agents):
                    agents.kill(moments.choice(agents.processes))
                    assert running.process.poll() is None
                if moments.random() < 0.8:
                    running.wait_until(lambda step=before: saved_step(run_dir) > step)  # type: ignore[misc]
                assert running.kill(after_seconds=moments.uniform(0.0, 0.5))
            left -= of_agents + 1
            happened += Counter(agents=of_agents, runs=1)
            if saved_step(run_dir):
                now = recorded(run_dir, steps=saved_step(run_dir))
                assert kept.items() <= now.items(), "what a checkpoint has is never lost"
                kept = now
        steps = saved_step(run_dir) + 2
        with started(run_dir, *flags, "--steps", str(steps)) as running:
            result = running.finish()
    assert result.status == 0, result.err
    assert_recorded(run_dir, result.accounting, steps=steps)
    found, written = recorded(run_dir, steps=steps), agents.notes()
    assert kept.items() <= found.items()
    posted = {note.marker: note.reward for note in written if note.what == "posted"}
    assert found.items() <= posted.items(), "a group has sessions that were rewarded, with their rewards"
    receipts = {note.receipt.rpartition("-")[0]: note.marker for note in written if note.what == "answered"}
    sessions = {(note.receipt.rpartition("-")[0], note.marker) for note in written if note.what == "answered"}
    assert len(receipts) == len(sessions), "no two sessions have the same receipts"
    begun, trained, discarded, carried = map(int, BALANCE.findall(result.out)[0])
    assert begun == trained + discarded + carried
    last_life = max(written, key=lambda note: int(note.receipt.split("-")[1])).receipt.split("-")[0]
    accepted = {note.marker for note in written if note.what == "accepted" and note.receipt.startswith(f"{last_life}-")}
    assert len(accepted - set(found)) <= discarded + carried
    lost = metrics(run_dir)[-1]["sessions/dropped"].get("lost", 0)
    return {**happened, "steps": steps, "begun": begun, "trained": trained, "discarded": discarded, "carried": carried,
            "lost": lost, "sessions in groups": len(found), "notes": len(written)}  # fmt: skip


@pytest.mark.slow  # three starts
def test_every_session_of_killed_agents_and_runs_is_accounted_for_once(tmp_path: Path) -> None:
    """A checkpoint keeps what it has, a reward that was posted counts in one group, and all counts balance."""
    happened = killed_agents(tmp_path, kills=5, seed=3)
    assert happened["trained"]
