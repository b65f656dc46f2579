"""The program: the command line of a run and of all other commands.

Imports are inside functions, in the order of their cost: the handlers of signals first, then flags, profiles and run
directories (a tenth of a second), so that bad input is refused before the modules of a training run (over a second).
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from training_run.profile.aliases import COMMANDS
from training_run.supervision.process_signals import process_signals

if TYPE_CHECKING:
    from rich.console import Console

    from training_run.directory.run_directory import RunDirectory, RunStage
    from training_run.profile.flags import Arguments
    from training_run.profile.load import Layer
    from training_run.profile.schema import Profile

    Train = Callable[[Profile, RunDirectory, Console], Awaitable[int]]
    LoadTrain = Callable[[], Train]

RELAXED_GPU_TIMEOUT = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"

MAX_LOADING = 300
"""Characters of the line that says what is being loaded."""

EXIT_SECONDS = 5.0
"""How long the end of a run waits for a terminal or a pipe that does not accept the last lines."""


def main(argv: Sequence[str] | None = None, *, load_train: LoadTrain) -> int:
    """Run the program, and return the exit status.

    argv: the arguments. None is for the process of the program: its arguments are used, and its signals and its
    standard output and standard error are taken over. A crash of native code prints the stacks of all threads.
    load_train: imports what trains a profile in a run directory; called when both are known to be valid.
    """
    if argv is not None:
        return _run(argv, load_train)[0]
    if "MLX_RANK" in os.environ and (status := _run_launched(sys.argv[1:])) is not None:
        return status
    process_signals.install()
    if sys.stderr is not None:
        faulthandler.enable()
    from training_run.records.output import Output

    output = Output()
    process_signals.before_exit(lambda: output.drain(EXIT_SECONDS))
    status, is_training = _run(sys.argv[1:], load_train)
    output.drain(EXIT_SECONDS if is_training else None)  # a pager reads help texts when its user wants to
    if not is_training and status == 0 and (problem := output.stdout.problem) and problem.errno != errno.EPIPE:
        sys.stderr.write(f"clotho: standard output cannot be written: {problem.strerror}\n")
        output.stderr.drain(EXIT_SECONDS)
        return 1
    if "MLX_RANK" in os.environ and is_training:
        process_signals.exit(status)  # MLX can crash while it closes connections to ranks that have ended
    return status


def _run(argv: Sequence[str], load_train: LoadTrain) -> tuple[int, bool]:
    """Return the exit status, and whether a run was started."""
    is_training = False
    try:
        if argv and argv[0] == "train":
            from training_run.profile.short_forms import spelled_out

            argv = spelled_out(argv)
        known = commands() if argv and not argv[0].startswith("-") else {}
        if known and (own := COMMANDS.get(argv[0])):
            from training_run.profile.program import announce

            announce(f"in the words of Clotho: {own}")
            argv = [own, *argv[1:]]
        if known and argv[0] not in known:
            from training_run.profile.flags import problem_of
            from training_run.profile.other_words import REPLACED_PROGRAM

            found = REPLACED_PROGRAM.first(argv, problem_of)
            argv = argv if found is None else found
        if known and argv and (command := known.get(argv[0])):
            return command(argv[1:])
        prepared = prepare(argv)
        if not isinstance(prepared, PreparedRun):
            return prepared, False
        is_training = True
        prepared.announce()
        return prepared.start(load_train()), True
    except KeyboardInterrupt:
        return 130, is_training
    except BaseException as error:
        from training_run.records.failure_report import report

        return report(error), is_training


def _run_launched(argv: Sequence[str]) -> int | None:
    """Run what `mlx.launch` has started beside the run; None for the process of the run, and for other commands."""
    if argv and COMMANDS.get(argv[0], argv[0]) in commands():
        return None
    from training_run.profile.program import LAUNCH

    return LAUNCH.first(argv)


def serve(argv: Sequence[str]) -> tuple[int, bool]:
    """Run the command `serve`; the result is that of `_run`. argv: the arguments after the command."""
    before_mlx()
    from training_run.profile.command_profiles import load_serving, serve_help

    if (text := serve_help(argv)) is not None:
        return _show_help(text)
    arguments = load_serving(argv)
    _say_loading(_console(), arguments.profile.model.path)
    import anyio

    from training_run.commands.serve import serve as run_server

    return anyio.run(run_server, arguments, _console()), True


def evaluate(argv: Sequence[str]) -> tuple[int, bool]:
    """Run the command `eval`; as `serve`."""
    before_mlx()
    from training_run.profile.command_profiles import evaluation_help, load_evaluation

    if (text := evaluation_help(argv)) is not None:
        return _show_help(text)
    from rich.console import Console

    arguments = load_evaluation(argv)
    _say_loading(Console(stderr=True), arguments.profile.model.path)  # standard output can be JSON
    import anyio

    from training_run.commands.evaluate import evaluate as run_evaluation

    return anyio.run(run_evaluation, arguments, _console()), False


def before_mlx() -> None:
    """Prepare the process for MLX, before its first import.

    On macOS, `AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1` makes the GPU driver end less work that delays the display. The
    variable is private to the driver and does not suffice on every Mac: a display that is on is still a finding.
    """
    from clotho.process import configure_malloc, load_blas

    if platform.system() == "Darwin":
        os.environ.setdefault(RELAXED_GPU_TIMEOUT, "1")
    configure_malloc()
    load_blas()


def _console() -> Console:
    from rich.console import Console

    return Console(file=sys.stdout)  # user code may replace sys.stdout


def _say_loading(console: Console, model: str) -> None:
    """Write one line before the imports that take seconds on a busy machine."""
    from training_run.records.terminal_text import print_line, relative_path

    print_line(console, f"loading  {relative_path(model)} ...", limit=MAX_LOADING)


def _show_help(text: str) -> tuple[int, bool]:
    sys.stdout.write(text)
    return 0, False


def _command(module: str) -> Callable[[Sequence[str]], tuple[int, bool]]:
    """The command of a module, whose `run` takes the arguments and a console."""

    def run(argv: Sequence[str]) -> tuple[int, bool]:
        before_mlx()
        found = importlib.import_module(module)
        return int(found.run(argv, _console())), False

    return run


def commands() -> dict[str, Callable[[Sequence[str]], tuple[int, bool]]]:
    """Return the commands besides a run, by the word after the program's name. They return as `_run`."""
    from training_run.profile.program import ATTACHED_COMMANDS

    further = {word: _command(module) for word, module in ATTACHED_COMMANDS().items()}
    return {"serve": serve, "eval": evaluate, **further}


class PreparedRun:
    """A profile, and the run directory that this process owns for it."""

    def __init__(self, profile: Profile, stages: Sequence[RunStage], directory: RunDirectory, console: Console) -> None:
        """stages: of the run; empty if it has one set of settings."""
        self._profile, self._stages, self._directory, self._console = profile, stages, directory, console
        gc.disable()  # the modules imported until `start` stay in use, so collections would only take time

    def close(self) -> None:
        """Let another process use the run directory."""
        gc.enable()
        self._directory.close()

    def announce(self) -> None:
        """Write what is being loaded, unless the display is off."""
        if self._profile.monitor.display != "none":
            _say_loading(self._console, self._profile.model.path)

    def start(self, train: Train) -> int:
        """Train; the exit status."""
        from training_run.records.failure_report import report

        gc.freeze()
        gc.enable()
        try:
            return self._train(train)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # includes SystemExit of user code
            return report(error, log=self._directory.log)
        finally:
            self.close()

    def _train(self, train: Train) -> int:
        """Train stage by stage, until one does not end well or a drain ends it before its last step."""
        import anyio

        from training_run.stages import remaining

        if not self._stages:
            return anyio.run(train, self._profile, self._directory, self._console)
        for stage in remaining(self._stages, self._directory):
            self._directory.stage = stage
            status = anyio.run(train, stage.profile, self._directory, self._console)
            self._directory.go_on()
            if status or stage in remaining(self._stages, self._directory):
                return status
        return 0


def prepare(argv: Sequence[str]) -> PreparedRun | int:
    """Read a command line (without the program's name). Returns the run to start, or the exit status.

    Exit status: 0 for help and a dry run. Raises ClothoError for bad input, before anything is written.
    """
    before_mlx()
    from clotho.storage.adapters import require_own_adapter
    from protocols.errors import ClothoError, RunDirectoryError
    from training_run.directory.run_directory import open_run
    from training_run.directory.run_paths import find_checkpoint
    from training_run.profile.flags import help_text, parse_arguments
    from training_run.profile.load import load_profile
    from training_run.profile.rules import CHECK
    from training_run.stages import stages_of

    console = _console()
    arguments = parse_arguments(argv)
    if arguments.help is not None:
        return _show_help(help_text(arguments.help, commands()))[0]
    fork = find_checkpoint(arguments.fork, "--fork").absolute() if arguments.fork else None

    def load(*layers: Layer) -> Profile:
        """Return the profile with further layers."""
        found = load_profile(
            arguments.profile,
            arguments.overrides,
            adjust=lambda below: [*adjusted(arguments, below), *layers],
        )
        CHECK(found)
        if found.actors:
            from training_run.supervision.custom_actors import require_positions

            require_positions(found)
        return found

    profile = load()
    stages = stages_of(profile, load)
    if arguments.dry_run:
        from training_run.commands.dry_run import dry_run

        shown: Literal["full", "changed"] = "full" if arguments.dry_run == "full" else "changed"
        return dry_run([stage.profile for stage in stages] or [profile], console, shown=shown)
    path = Path(os.path.expanduser(profile.run_dir))
    if fork is not None and path.resolve() in fork.resolve().parents:
        raise RunDirectoryError(f"--fork: {path} is the forked run itself: choose another --run-dir")
    if arguments.resume:
        refuse_missing_run(path)
    supervise(profile)
    with process_signals.postponed():
        directory = open_run(
            path, resume=arguments.resume, clean=arguments.clean, resume_step=arguments.resume_step, fork=fork
        )
        process_signals.before_exit(directory.close)
    try:
        if profile.checkpoint.adapter_path:
            require_own_adapter(profile.checkpoint.adapter_path, directory.run_id)
    except ClothoError:
        directory.close()
        raise
    return PreparedRun(profile, stages, directory, console)


def supervise(profile: Profile) -> None:
    """Let an attachment replace this process by a supervisor of the run, if it is the process of the program."""
    from training_run.profile.program import SUPERVISE

    if process_signals.installed:
        SUPERVISE(profile)


def adjusted(arguments: Arguments, layers: list[Layer]) -> list[Layer]:
    """Return the layers of a profile with the settings of the adapter that the run starts from, if there is one.

    A fork starts from the weights of its source, whatever these had started from. A resumed run needs the adapter only
    for settings that its command line lacks.
    """
    key = "policy.adapter"
    if arguments.fork:
        return [
            layer._replace(values={**layer.values, key: ""} if key in layer.values else layer.values)
            for layer in layers
        ]
    named = [layer.values[key] for layer in layers if key in layer.values]
    if not named or not named[-1]:
        return layers
    from training_run.start.adapter_settings import exists, with_adapter

    return layers if arguments.resume and not exists(named[-1]) else with_adapter(layers)


def refuse_missing_run(path: Path) -> None:
    """Raise `RunDirectoryError` if there is no run to resume in a directory, naming the nearest run beside it."""
    from protocols.errors import RunDirectoryError, did_you_mean

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
