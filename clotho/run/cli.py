"""The command line: reads the flags and refuses bad input before anything that takes time is imported.

Importing the modules of a training run takes more than a second. Importing the modules for flags, profiles and run
directories takes a tenth of a second, and `prepare` needs no others. It handles `--help` and `--dry-run`, and returns
a run that is ready to start.
"""

from __future__ import annotations

from clotho.cpu import load_blas

load_blas()  # before the first import of MLX

import gc
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
from rich.console import Console

from clotho.config.flags import help_text, parse_arguments
from clotho.config.load import load_profile, resolved_toml
from clotho.config.nearest import did_you_mean
from clotho.config.schema import Profile
from clotho.monitoring.failure_report import report
from clotho.run.process_signals import process_signals
from clotho.storage.adapters import require_own_adapter
from clotho.storage.run_directory import RunDirectory, open_run
from protocols.errors import ClothoError, RunDirectoryError

Train = Callable[[Profile, RunDirectory, Console], Awaitable[int]]
"""Trains a profile in a run directory; returns the exit status."""


class PreparedRun:
    """A profile, and the run directory that this process owns for it."""

    def __init__(self, profile: Profile, directory: RunDirectory, console: Console) -> None:
        self._profile, self._directory, self._console = profile, directory, console
        gc.disable()  # the modules imported until `start` stay in use, so collections would only take time

    def close(self) -> None:
        """Let another process use the run directory."""
        gc.enable()
        self._directory.close()

    def start(self, train: Train) -> int:
        """Train; the exit status."""
        gc.freeze()
        gc.enable()
        try:
            return anyio.run(train, self._profile, self._directory, self._console)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # includes SystemExit of user code
            return report(error, log=self._directory.log)
        finally:
            self.close()


def prepare(argv: Sequence[str]) -> PreparedRun | int:
    """Read a command line (without the program's name). Returns the run to start, or the exit status.

    Exit status: 0 for help and a dry run, 2 for bad input.
    """
    console = Console(file=sys.stdout)  # user code may replace sys.stdout
    try:
        arguments = parse_arguments(argv)
        if arguments.help is not None:
            console.print(help_text(arguments.help), markup=False, highlight=False, soft_wrap=True, end="")
            return 0
        profile = load_profile(arguments.profile, arguments.overrides)
        if arguments.dry_run:
            return dry_run(profile, console)
        path = Path(os.path.expanduser(profile.run_dir))
        if arguments.resume:
            refuse_missing_run(path)
        with process_signals.postponed():
            directory = open_run(path, resume=arguments.resume, clean=arguments.clean)
            process_signals.before_exit(directory.close)
        try:
            if profile.checkpoint.adapter_path:
                require_own_adapter(profile.checkpoint.adapter_path, directory.run_id)
        except ClothoError:
            directory.close()
            raise
        return PreparedRun(profile, directory, console)
    except ClothoError as error:
        return report(error)


def refuse_missing_run(path: Path) -> None:
    """Raise `RunDirectoryError` if there is no run to resume in a directory, naming the nearest run beside it."""
    try:
        if path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()):
            return
        beside = list(path.parent.iterdir()) if path.parent.is_dir() else []
    except OSError as error:
        raise RunDirectoryError(f"run directory {path} cannot be read: {error.strerror}") from error
    runs = [str(entry) for entry in beside if (entry / "profile.toml").is_file()]
    hint = did_you_mean(str(path), runs) or "; start a new run without --resume"
    what = "contains no run" if path.is_dir() else "does not exist"
    raise RunDirectoryError(f"--resume: run directory {path} {what}{hint}")


def dry_run(profile: Profile, console: Console) -> int:
    """Print the resolved profile and the memory that its run would take; write nothing."""
    console.print(resolved_toml(profile, mask_secrets=True), markup=False, highlight=False, soft_wrap=True)
    from clotho.memory.estimate import estimate_memory
    from clotho.memory.report import describe
    from clotho.models.machine import physical_memory
    from clotho.monitoring.summary import print_estimate

    estimate = estimate_memory(profile.model, profile)
    print_estimate(console, estimate, describe(estimate), physical_memory())
    return 0
