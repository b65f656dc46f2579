"""A power cut at any instant leaves the newest checkpoint that was reported, and the lines that it covers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from clotho.storage.atomic_files import remove_leftovers
from tests.training_run.directory.power_cut.simulated_disk import (
    RECORDABLE,
    SimulatedDisk,
    build_recorder,
    read_journal,
    recording,
)
from training_run.directory.checkpoints import latest_checkpoint, read_state, recorded_newest
from training_run.directory.jsonl import scan
from training_run.records.evaluation_history import MetricsRecord

pytestmark = RECORDABLE

CUTS = 15

WRITER = """
import sys
from pathlib import Path
import anyio
from training_run.directory.jsonl import JsonlWriter
from training_run.directory.run_directory import open_run
from tests.actors.actor_helpers import filled_queue
from tests.actors.checkpointer_harness import checkpointer_of, update

async def main(disk):
    run = open_run(disk / "outer" / "run", resume=False, clean=False)
    run.begin()
    metrics = JsonlWriter(run.metrics)
    for step in range(1, 4):
        metrics.append({"step": step, "text": "x" * 3000})
        updates = filled_queue("updates", [update(step)])
        await checkpointer_of(run.path, updates, interval=1, keep_last=2).run()
        with (disk / "reported").open("a") as file:
            file.write(f"{step}\\n")
    run.close()

anyio.run(main, Path(sys.argv[1]))
"""


def record(tmp_path: Path, script: str) -> tuple[Path, Path]:
    """Run a Python script with a directory as its argument. Return the directory and the journal of its changes."""
    disk, journal = tmp_path / "disk", tmp_path / "journal"
    disk.mkdir()
    environment = recording(build_recorder(tmp_path), disk, journal)
    subprocess.run(
        [sys.executable, "-c", script, str(disk)],
        check=True,
        env=os.environ | environment | {"PYTHONPATH": os.getcwd()},
    )
    return disk, journal


def contents(directory: Path) -> dict[str, bytes | None]:
    """Return every file below a directory with its contents, and every directory with None."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


def test_a_power_cut_leaves_the_reported_checkpoint_and_its_lines(tmp_path: Path) -> None:
    """60 cuts of the changes of a checkpointer. The record is complete: all changes together give the directory."""
    disk, journal = record(tmp_path, WRITER)
    changes = read_journal(journal)
    whole = SimulatedDisk(disk, empty=True)
    for change in changes:
        whole.apply(change)
    whole.write_to(tmp_path / "whole")
    assert contents(tmp_path / "whole") == contents(disk)
    chance = random.Random(0)
    for seed in range(CUTS):
        instant = chance.randrange(len(changes))
        cut = SimulatedDisk(disk, empty=True)
        reported = 0
        for change in changes[:instant]:
            cut.apply(change)
            reported += change.kind == "w" and change.first == str(disk / "reported")
        target = tmp_path / f"cut-{seed}"
        cut.after_cut(target, seed)
        run = target / "outer" / "run"
        remove_leftovers(run / "checkpoints")
        found = latest_checkpoint(run / "checkpoints")
        assert found.warnings == ()
        step = read_state(found.path).step if found.path else 0
        assert step >= reported, (seed, instant)
        if step:
            recorded = scan(run / "metrics.jsonl", step, MetricsRecord)
            assert list(recorded.recorded) == list(range(1, step + 1)), (seed, instant)
        if reported:
            newest = recorded_newest(run / ".newest_checkpoint")
            assert newest is not None
            assert reported <= newest <= step


SMALL_CHANGES: list[tuple[str, set[bytes | None]]] = [
    ("write(file)", {b"", b"new", b"\0\0\0", None}),
    ("sync_file(write(file))", {b"new", None}),
    ("write(file); sync_directory(disk)", {b"", b"new", b"\0\0\0"}),
    ("sync_file(write(file)); sync_directory(disk)", {b"new"}),
    ("sync_file(write(disk / 'x')); sync_directory(disk); (disk / 'x').rename(file)", {b"new", None}),
    ("replace_file(file, [b'old']); replace_file(file, [b'new'])", {b"new"}),
    ("replace_file(file, [b'old']); write(disk / 'x').rename(file)", {b"old", b"new", b"", b"\0\0\0"}),
]
"""Changes of a file, and the contents that a power cut after them may leave (None: no file)."""

PRELUDE = """
import sys
from pathlib import Path
from clotho.storage.atomic_files import replace_file, sync_directory, sync_file

def write(path):
    path.write_text("new")
    return path
"""


def test_a_simulated_power_cut_loses_what_was_not_synced(tmp_path: Path) -> None:
    """The contents of a file need an fsync of the file, and its name one of the directory."""
    script = PRELUDE + "".join(
        f"disk = Path(sys.argv[1]) / '{number}'; disk.mkdir(); sync_directory(disk.parent)\n"
        f"file = disk / 'file'; {changes}\n"
        for number, (changes, _) in enumerate(SMALL_CHANGES)
    )
    disk, journal = record(tmp_path, script)
    found: list[set[bytes | None]] = [set() for _ in SMALL_CHANGES]
    for seed in range(200):
        cut = SimulatedDisk(disk, empty=True)
        for change in read_journal(journal):
            cut.apply(change)
        cut.after_cut(tmp_path / str(seed), seed)
        for number, contents_found in enumerate(found):
            path = tmp_path / str(seed) / str(number) / "file"
            contents_found.add(path.read_bytes() if path.exists() else None)
    assert found == [possible for _, possible in SMALL_CHANGES]
