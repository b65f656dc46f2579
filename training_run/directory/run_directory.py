"""Run directory: creation, lock, resume, and cleaning. One process at a time owns a run directory."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from clotho.extension import TableDoor
from clotho.storage.adapters import CONFIG, TENSORS
from clotho.storage.atomic_files import is_leftover, remove_leftovers, replace_file, sync_directory
from protocols.checkpoint import Origin
from protocols.errors import RunDirectoryError, disk_errors_as, visible
from training_run.directory.checkpoints import DIRECTORY_NAME, checkpoint_steps

if TYPE_CHECKING:
    from training_run.profile.schema import Profile

LOCK = ".lock"
MAX_COMMAND_CHARACTERS = 120

_locked: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _close_in_fork() -> None:
    """Close the locks in a forked child: the child must not keep a run directory in use."""
    while _locked:
        os.close(_locked.pop())


os.register_at_fork(after_in_child=_close_in_fork)


class RunLock:
    """An advisory lock on `directory`/.lock, held until `release` or the end of the process.

    No child process inherits the lock: programs that the process starts have the descriptor closed, and forks of Python
    close it.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock. Raises RunDirectoryError, naming the process, if another process holds the lock."""
        self._path = directory / LOCK
        self._descriptor = self._open()
        while not self._is_in_place():  # the previous owner removed the file between open and lock
            os.close(self._descriptor)
            self._descriptor = self._open()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        _locked.add(self._descriptor)

    def release(self, *, remove: bool = False) -> None:
        """Release the lock; a second call has no effect. remove: delete the lock file."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink() if remove else os.ftruncate(self._descriptor, 0)
            _locked.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        """Open and lock the file. Raises RunDirectoryError if another process holds the lock."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            recorded = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise RunDirectoryError(f"run directory {self._path.parent} {_in_use(self._path, recorded)}") from error
        return descriptor

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False


def _in_use(lock: Path, recorded: str) -> str:
    """Return who holds a lock, and what to do. recorded: the process id in the file; empty after the end of its run.

    The processes that have the file open are found where the system lists them: on Linux and macOS, those of the same
    user.
    """
    holders = _processes_with(lock)
    if recorded.isdecimal() and (int(recorded) in holders or not holders):
        command = holders.get(int(recorded), "")
        return f"is in use by process {recorded}{command}: wait for it to end, or use another --run-dir"
    if not holders:
        return "is in use by an unknown process: wait for it to end, or use another --run-dir"
    stray = ", ".join(f"process {number}{command}" for number, command in sorted(holders.items()))
    numbers = " ".join(map(str, sorted(holders)))
    return (
        f"is in use by {stray}, which an earlier run left behind: end it with kill -9 {numbers}, "
        "or use another --run-dir"
    )


def _processes_with(file: Path) -> dict[int, str]:
    """Return the other processes that have a file open, by id, each with its command line in parentheses."""
    import psutil  # only a refusal needs it

    path, found = str(file.resolve()), {}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(opened.path == path for opened in process.open_files()):
                found[process.pid] = f" ({visible(' '.join(process.cmdline()), MAX_COMMAND_CHARACTERS)})"
        except (psutil.Error, OSError):
            continue
    return found


NEWEST_CHECKPOINT = ".newest_checkpoint"
BEST, LINEAGE, PREFLIGHT, SUPERSEDED = "best.json", "lineage.json", "preflight.json", "superseded"
PREVIOUS_LOG = "log.1.jsonl"
"""The event log before log.jsonl, after log.jsonl has reached its maximum size."""
FACTS, TIMELINE = "facts.json", "timeline.jsonl"
LINES = frozenset({"metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", TIMELINE, "log.jsonl", PREVIOUS_LOG})
FILES = LINES | {"profile.toml", FACTS, PREFLIGHT, NEWEST_CHECKPOINT, BEST, LINEAGE}
DIRECTORIES = frozenset({"checkpoints", "adapters", SUPERSEDED})
"""Directories of a run, beside those of attachments."""

ATTACHED_DIRECTORIES: TableDoor[str] = TableDoor("attachment.DIRECTORIES")
"""Directories of attachments, with the pattern of the names of their entries; other entries are not deleted."""
SUPERSEDED_NAME = re.compile(r"[0-9]{3,}-after-step-[0-9]{6,}")
"""Entries of the directory of what `--resume-step` has set aside."""
RUN_ID = ".run_id"
IGNORED = frozenset({LOCK, RUN_ID, ".DS_Store"})
"""Entries that neither make a directory a run directory nor prevent cleaning."""


def read_run_id(run: Path) -> str:
    """Return the id of the run in a directory; empty if there is none."""
    path = run / RUN_ID
    return path.read_text(encoding="utf-8", errors="replace").strip()[:64] if path.is_file() else ""


def read_origin(path: Path) -> Origin | None:
    """Read `lineage.json`; None if there is none, or if it is not valid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Origin)
    except (OSError, ValueError, RecursionError):
        return None


def unbegun_fork(run: Path) -> Origin | None:
    """Return what a fork started from that ended before its first checkpoint, and so has nothing of its own."""
    origin = read_origin(run / LINEAGE)
    has_begun = (run / NEWEST_CHECKPOINT).exists() or checkpoint_steps(run / "checkpoints")
    return origin if origin is not None and origin.kind == "fork" and not has_begun else None


class RunStage(Struct, frozen=True, kw_only=True, eq=False):
    """number: from 1. first_step: number of steps before the stage. profile: its settings; it ends at its `steps`.

    recorded: the profile of the whole run.
    """

    number: int
    first_step: int
    profile: Profile
    recorded: Profile


class RunDirectory:
    """The paths of one run. This process owns the directory until `close`.

    Nothing in the directory changes before `begin`, so that a refused run leaves no trace.

    profile: the resolved profile. log: one JSON line per event. metrics, evaluations, rollouts: per step, evaluation
    and ended group. histories: all of these; a checkpoint relies on them up to its step. timeline: about one JSON line
    per second about compute threads and queues. facts: about machine, model and server of the last start. checkpoints:
    a directory each. superseded: checkpoints and histories that `--resume-step` has set aside. adapters: the final
    adapter, in the format of mlx-lm. newest_checkpoint: file with the step of the newest one that was written, which
    tells whether checkpoints were lost. best: names the best one. lineage: describes the weights that the run started
    from; absent if these are the base model alone. preflight: findings of the last start, as JSON.

    resumed: whether the directory held a run that continues now. resume_step: step of the checkpoint from which it
    continues; None for the newest. fork: checkpoint of another run that the run starts from. clean: whether an earlier
    run is deleted when this one begins. stage: the present one, if the run has several. run_id: identifies the run
    across restarts; adapters that the run writes carry it. `--clean` keeps the id, so that the new run may overwrite
    the adapters of the old one.
    """

    def __init__(
        self,
        path: Path,
        lock: RunLock,
        *,
        resumed: bool,
        clean: bool,
        created: list[Path],
        resume_step: int | None = None,
        fork: Path | None = None,
    ) -> None:
        """created: directories that `open_run` created, innermost first."""
        self.path = path
        self.profile, self.log = path / "profile.toml", path / "log.jsonl"
        self.metrics, self.evaluations = path / "metrics.jsonl", path / "evaluations.jsonl"
        self.rollouts, self.timeline, self.facts = path / "rollouts.jsonl", path / TIMELINE, path / FACTS
        self.histories = self.metrics, self.evaluations, self.rollouts, self.log
        self.checkpoints, self.superseded, self.adapters = path / "checkpoints", path / SUPERSEDED, path / "adapters"
        self.newest_checkpoint, self.best, self.lineage = path / NEWEST_CHECKPOINT, path / BEST, path / LINEAGE
        self.preflight = path / PREFLIGHT
        self.resumed, self.resume_step, self.fork = resumed, resume_step, fork
        id_file = path / RUN_ID
        self.run_id = id_file.read_text().strip() if id_file.is_file() else uuid.uuid4().hex
        self._lock, self.clean, self._created = lock, clean, created
        self.stage: RunStage | None = None

    def written(self) -> Iterator[str]:
        """Yield the names of the files of the run that exist, in alphabetical order; directories end in a slash."""
        for path in sorted(self.path.iterdir()):
            if path.name in FILES - {NEWEST_CHECKPOINT}:
                yield path.name
            elif path.name in _directories() and any(path.iterdir()):
                yield f"{path.name}/"

    def begin(self) -> None:
        """Take the directory into use: delete the earlier run if requested, and remove leftovers of a kill.

        Raises RunDirectoryError if the disk refuses.
        """
        with disk_errors_as(RunDirectoryError, f"run directory {self.path} cannot be used"):
            for created in self._created:
                sync_directory(created.parent)
            if self.clean:
                _clean(self.path)
                sync_directory(self.path)  # a power failure cannot bring back checkpoints of the earlier run
            for directory in (self.path, *(self.path / name for name in _directories())):
                remove_leftovers(directory)
            if not (self.path / RUN_ID).exists():
                replace_file(self.path / RUN_ID, [f"{self.run_id}\n".encode()])
        self._created = []

    def go_on(self) -> None:
        """Let the next stage continue from the newest checkpoint."""
        self.resumed, self.resume_step, self.fork, self.clean = True, None, None, False

    def close(self) -> None:
        """Release the directory. Directories that were created for a run that did not begin are removed."""
        self._lock.release(remove=bool(self._created))
        _remove_empty(self._created)


def open_run(
    path: Path, *, resume: bool, clean: bool, resume_step: int | None = None, fork: Path | None = None
) -> RunDirectory:
    """Lock `path` as the run directory of this process; nothing in it changes before `RunDirectory.begin`.

    An earlier run in the directory is continued with `resume`, deleted in `begin` with `clean`, and refused otherwise,
    but a fork replaces one that ended before its first checkpoint. resume_step, fork: as in `RunDirectory`. Files that
    no run writes are never deleted. Raises RunDirectoryError if the directory holds another run or other files, is in
    use, or is not writable.
    """
    if resume and clean:
        raise RunDirectoryError("--resume continues the run and --clean deletes it: choose one")
    path = Path(path).expanduser()
    with disk_errors_as(RunDirectoryError, f"run directory {path} cannot be used"):
        return _open(path, resume=resume, clean=clean, resume_step=resume_step, fork=fork)


def _open(path: Path, *, resume: bool, clean: bool, resume_step: int | None, fork: Path | None) -> RunDirectory:
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"run directory {path} is a file: choose another --run-dir")
    created = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        entries = _entries(path)
        if entries and not entries & (FILES | _directories()):
            raise RunDirectoryError(f"run directory {path} holds other files but no run: choose another --run-dir")
        if not os.access(path, os.W_OK | os.X_OK):
            raise RunDirectoryError(f"run directory {path} is not writable: choose another --run-dir")
        lock = RunLock(path)
    except BaseException:
        _remove_empty(created)
        raise
    try:
        holds_run = bool(_entries(path) & (FILES | _directories()))
        clean = clean or bool(fork and unbegun_fork(path))
        if holds_run and not (resume or clean):
            raise RunDirectoryError(
                f"run directory {path} holds another run: continue it with --resume, delete it with --clean, "
                "or choose another --run-dir"
            )
        if clean:
            _refuse_foreign(path)
    except BaseException:
        lock.release()
        raise
    resumed = resume and holds_run
    return RunDirectory(path, lock, resumed=resumed, clean=clean, created=created, resume_step=resume_step, fork=fork)


def _entries(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if entry.name not in IGNORED and not is_leftover(entry)}


def _remove_empty(created: list[Path]) -> None:
    """Remove directories, innermost first, until one is not empty."""
    with suppress(OSError):
        for directory in created:
            directory.rmdir()


def _refuse_foreign(path: Path) -> None:
    foreign = [str(entry.relative_to(path)) for entry in _foreign(path)]
    if foreign:
        raise RunDirectoryError(
            f"run directory {path} cannot be cleaned, because it holds files that no run writes "
            f"({', '.join(sorted(foreign)[:5])}): move them away, or choose another --run-dir"
        )


def _clean(path: Path) -> None:
    """Delete a run. Every entry is checked first; with foreign files, nothing is deleted."""
    _refuse_foreign(path)
    for entry in path.iterdir():
        if entry.name in FILES or is_leftover(entry):
            entry.unlink() if not entry.is_dir() else shutil.rmtree(entry)
        elif entry.name in _directories():
            shutil.rmtree(entry)


def _directories() -> frozenset[str]:
    return DIRECTORIES | ATTACHED_DIRECTORIES().keys()


def _foreign(path: Path) -> list[Path]:
    foreign = []
    for entry in path.iterdir():
        if entry.name in IGNORED or is_leftover(entry):
            continue
        if entry.name in FILES and entry.is_file():
            continue
        if entry.name in _directories() and entry.is_dir() and not entry.is_symlink():
            foreign += [inner for inner in entry.iterdir() if not _is_run_entry(inner)]
            continue
        foreign.append(entry)
    return foreign


def _is_run_entry(inner: Path) -> bool:
    """Return whether an entry of a subdirectory is one that a run writes."""
    if is_leftover(inner) or inner.name in IGNORED:
        return True
    if (pattern := ATTACHED_DIRECTORIES().get(inner.parent.name)) is not None:
        return re.fullmatch(pattern, inner.name) is not None
    if inner.parent.name == SUPERSEDED:
        return SUPERSEDED_NAME.fullmatch(inner.name) is not None and inner.is_dir() and not inner.is_symlink()
    if inner.name in (TENSORS, CONFIG):
        return True
    return DIRECTORY_NAME.fullmatch(inner.name) is not None and inner.is_dir() and not inner.is_symlink()
