"""The directory a run writes to: made, taken over, cleaned or refused before anything else happens.

One living process per run directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from clotho.storage.adapters import CONFIG, TENSORS
from clotho.storage.atomic_files import is_leftover, tidy
from clotho.storage.checkpoints import NAME
from protocols.errors import RunDirectoryError

LOCK = ".lock"


class RunLock:
    """An advisory lock on `directory`/.lock, held until `release` or the end of the process, however it ends."""

    def __init__(self, directory: Path) -> None:
        """Take the lock. Raises `RunDirectoryError`, naming the process, while another one holds it."""
        self._path = directory / LOCK
        self._descriptor = self._open()
        while not self._is_in_place():  # its last holder removed it between our opening and our locking it
            os.close(self._descriptor)
            self._descriptor = self._open()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self, *, remove: bool = False) -> None:
        """Let the next process in; a second call does nothing. remove: leave no file behind either."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink() if remove else os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        """Open and lock the file, whichever it is by now."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunDirectoryError(
                f"run directory {self._path.parent} is in use by process {holder}: "
                "wait for it to end, or use another --run-dir"
            ) from error
        return descriptor

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False


FILES = frozenset({"profile.toml", "metrics.jsonl", "rollouts.jsonl", "log.jsonl"})
PROCESSES = "atropos"
DIRECTORIES = frozenset({"checkpoints", "adapters", PROCESSES})
OF_PROCESSES = re.compile(r"[A-Za-z0-9_-]+\.(log|log\.1|json)|env_checkpoints")
"""What processes leave in their directory: output, settings, and, made by atroposlib, checkpoints of environments."""
IGNORED = frozenset({LOCK, ".DS_Store"})


class RunDirectory:
    """The paths of one run, which this process owns until `close`. Every path lies under `path`.

    Until `begin`, nothing in it is changed: a run that is refused for what its profile names leaves no trace.
    resumed: whether the directory held a run that is being continued.
    """

    def __init__(self, path: Path, lock: RunLock, *, resumed: bool, clean: bool, made: list[Path]) -> None:
        """clean: delete the run it holds when this one begins. made: what `open_run` made of it, innermost first."""
        self.path = path
        self.resumed = resumed
        self._lock, self._clean, self._made = lock, clean, made

    @property
    def profile(self) -> Path:
        """The resolved profile, TOML."""
        return self.path / "profile.toml"

    @property
    def metrics(self) -> Path:
        """One JSON line per policy update."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One JSON line per group, trained on or not."""
        return self.path / "rollouts.jsonl"

    @property
    def log(self) -> Path:
        """One JSON line per event."""
        return self.path / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One directory per checkpoint."""
        return self.path / "checkpoints"

    @property
    def adapters(self) -> Path:
        """The final adapter, as mlx-lm loads it."""
        return self.path / "adapters"

    @property
    def atropos(self) -> Path:
        """What the processes of environments print and keep."""
        return self.path / PROCESSES

    def begin(self) -> None:
        """From here on the directory is written to: delete an earlier run if asked; undo what a kill left half done.

        Raises `RunDirectoryError` where the disk refuses.
        """
        try:
            if self._clean:
                _clean(self.path)
            for directory in (self.path, self.checkpoints, self.adapters):
                tidy(directory)
        except OSError as error:
            raise RunDirectoryError(f"run directory {self.path} cannot be used: {error.strerror or error}") from error
        self._made = []

    def close(self) -> None:
        """Let another process use the directory; one that was made, and in which no run began, is removed again."""
        self._lock.release(remove=bool(self._made))
        _remove(self._made)
        self._made = []


def open_run(path: Path, *, resume: bool, clean: bool) -> RunDirectory:
    """Make `path` this process's run directory; `RunDirectory.begin` is what first changes anything in it.

    An earlier run in it is refused, continued (`resume`) or, once this one begins, deleted (`clean`); resuming where
    there is nothing yet begins afresh. Nothing that is not a run's is ever deleted. Raises `RunDirectoryError`, in one
    line that says what to do, where the directory holds another run or foreign files, is in use, or cannot be written.
    """
    if resume and clean:
        raise RunDirectoryError("--resume keeps what --clean deletes: give one of them")
    path = Path(path).expanduser()
    try:
        return _open(path, resume=resume, clean=clean)
    except RunDirectoryError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"run directory {path} cannot be used: {error.strerror or error}") from error


def _open(path: Path, *, resume: bool, clean: bool) -> RunDirectory:
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"run directory {path} is a file: choose another --run-dir")
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        entries = _entries(path)
        if entries and not entries & (FILES | DIRECTORIES):
            raise RunDirectoryError(f"run directory {path} holds other files and no run: choose another --run-dir")
        if not os.access(path, os.W_OK | os.X_OK):
            raise RunDirectoryError(f"run directory {path} is not writable: choose another --run-dir")
        lock = RunLock(path)
    except BaseException:
        _remove(made)
        raise
    try:
        holds_run = bool(_entries(path) & (FILES | DIRECTORIES))
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
    return RunDirectory(path, lock, resumed=resume and holds_run, clean=clean, made=made)


def _entries(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if entry.name not in IGNORED and not is_leftover(entry)}


def _remove(made: list[Path]) -> None:
    """Remove directories that were made in vain, innermost first, as far as nobody else has put anything there."""
    with suppress(OSError):
        for directory in made:
            directory.rmdir()


def _refuse_foreign(path: Path) -> None:
    foreign = [str(entry.relative_to(path)) for entry in _foreign(path)]
    if foreign:
        raise RunDirectoryError(
            f"run directory {path} is not cleaned, for it holds files that no run writes "
            f"({', '.join(sorted(foreign)[:5])}): move them away, or choose another --run-dir"
        )


def _clean(path: Path) -> None:
    """Delete a run, after looking at every entry: all of them are a run's, or nothing is deleted."""
    _refuse_foreign(path)
    for entry in path.iterdir():
        if entry.name in FILES or is_leftover(entry):
            entry.unlink() if not entry.is_dir() else shutil.rmtree(entry)
        elif entry.name in DIRECTORIES:
            shutil.rmtree(entry)


def _foreign(path: Path) -> list[Path]:
    strangers = []
    for entry in path.iterdir():
        if entry.name in IGNORED or is_leftover(entry):
            continue
        if entry.name in FILES and entry.is_file():
            continue
        if entry.name in DIRECTORIES and entry.is_dir() and not entry.is_symlink():
            strangers += [inner for inner in entry.iterdir() if not _belongs(inner)]
            continue
        strangers.append(entry)
    return strangers


def _belongs(inner: Path) -> bool:
    """Whether an entry of one of the directories is a run's."""
    if is_leftover(inner) or inner.name in IGNORED:
        return True
    if inner.parent.name == PROCESSES:
        return OF_PROCESSES.fullmatch(inner.name) is not None
    if inner.name in (TENSORS, CONFIG):
        return True
    return NAME.fullmatch(inner.name) is not None and inner.is_dir() and not inner.is_symlink()
