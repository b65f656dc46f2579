"""The tasks of a taskset as problems of a run, and the messages to and from the process that plays them.

The process is `taskset_program.py`, which knows the messages as MessagePack maps. `number` names an episode.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from attachments.verifiers.sections import TASKSET, VERIFIERS
from protocols.errors import DatasetError, ProfileError, visible
from protocols.prompt import Problem
from training_run.episodes.messages import Ask, EpisodeEnded, Failed, PolicyTurn
from training_run.profile.data import DataSection
from training_run.profile.generators import Generate
from training_run.supervision.guarded_process import ProcessSettings


class TasksetProgram(ProcessSettings, frozen=True, kw_only=True):
    """Run -> process, in the command line.

    directory: of tasksets that are not installed; empty: none. tasks: number of tasks; 0: all. tasks_file: the process
    writes them to this file and ends; empty: it plays tasks.
    """

    taskset: str
    directory: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    tasks: int
    tasks_file: str = ""


class ListedTask(Struct, frozen=True, kw_only=True):
    """A task in the file. prompt: text of the last message. messages: before the first one of the policy."""

    prompt: str
    messages: tuple[dict[str, Any], ...]
    data: dict[str, Any]


class BeginTask(Struct, frozen=True, kw_only=True, tag=True):
    """Run -> process. Begin an episode. task: its data, as it was listed."""

    number: int
    task: dict[str, Any]


class ContinueTask(Struct, frozen=True, kw_only=True, tag=True):
    """Run -> process. The policy has answered."""

    number: int
    turn: PolicyTurn


class ForgetTask(Struct, frozen=True, kw_only=True, tag=True):
    """Run -> process. The episode has ended in the run; the answer is `Forgotten`."""

    number: int


class TasksetLoaded(Struct, frozen=True, kw_only=True, tag=True):
    """Process -> run. The taskset is imported; the number is 0."""


class Forgotten(Struct, frozen=True, kw_only=True, tag=True):
    """Process -> run. The episode has ended in the process, whatever the run knows of it."""


class Numbered(Struct, frozen=True, kw_only=True):
    """Process -> run. What an episode does next."""

    number: int
    event: TasksetLoaded | Ask | EpisodeEnded | Failed | Forgotten


LIST_SECONDS = 600.0
"""Time limit of a taskset that lists its tasks; some download their data."""

INSTALL = "install verifiers==0.4.0 in a virtual environment"

PROGRAM = Path(__file__).with_name("taskset_program.py")


def taskset_of(data: DataSection) -> str:
    """Return the taskset that data.train names; empty if it names none."""
    return data.train.removeprefix(VERIFIERS) if data.train.startswith(VERIFIERS) else ""


def require_python(data: DataSection) -> None:
    """Raise ProfileError unless the interpreter exists, and verifiers is installed beside the project without one."""
    python = TASKSET.of(data).python
    if python and shutil.which(python) is None:
        raise ProfileError(f"data.verifiers.python {python} is no interpreter: {INSTALL}, and name its bin/python")
    if not python and find_spec("verifiers") is None:
        raise ProfileError(f"data.verifiers.python is empty, and verifiers is not installed beside Clotho: {INSTALL}")


def command(data: DataSection) -> tuple[str, ...]:
    """Return the command of the process, without the settings."""
    return TASKSET.of(data).python or sys.executable, "-P", str(PROGRAM)


def program(data: DataSection, *, tasks_file: str = "") -> TasksetProgram:
    """Return the settings of the process. tasks_file: it lists the tasks there."""
    section = TASKSET.of(data)
    return TasksetProgram(
        memory_bytes=section.memory_limit_mb * 2**20,
        taskset=taskset_of(data),
        directory=section.directory,
        settings=section.settings,
        environment=section.environment,
        tasks=section.tasks,
        tasks_file=tasks_file,
    )


@contextmanager
def opened(data: DataSection) -> Iterator[Generate]:
    """Return what lists the problems of a profile."""
    yield partial(listed, data)


def listed(
    data: DataSection, path: str, *, seed: int, part: str = "train", excluded: Collection[str] = ()
) -> Sequence[Problem]:
    """Return the tasks as problems, whose columns are the data of the task. Raises DatasetError."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tasks.json"
        settings = msgspec.json.encode(program(data, tasks_file=str(file))).decode()
        try:
            done = subprocess.run(
                [*command(data), settings],
                capture_output=True,
                timeout=LIST_SECONDS,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DatasetError(f"{path} did not list its tasks within {LIST_SECONDS:g} s") from None
        except OSError as error:
            raise DatasetError(f"data.verifiers.python {command(data)[0]}: {error.strerror or error}") from error
        if done.returncode or not file.exists():
            said = (done.stderr or done.stdout).decode(errors="replace").strip().rpartition("\n")[2]
            raise DatasetError(f"{visible(path, 200)}: {visible(said, 400) or 'its tasks cannot be listed'}")
        tasks = msgspec.json.decode(file.read_bytes(), type=list[ListedTask])
    if not tasks:
        raise DatasetError(f"{visible(path, 200)} has no tasks")
    kind = os.path.basename(taskset_of(data))
    return [
        Problem(
            prompt=task.prompt,
            answer=answer if isinstance(answer := task.data.get("answer"), str) else "",
            type=kind,
            messages=task.messages,
            extra=task.data,
        )
        for task in tasks
    ]


def epoch_weights(data: DataSection, problems: Sequence[Problem]) -> Mapping[str, float]:
    """Return the weight of each type of problem in an epoch: `data.type_weights`."""
    return data.type_weights
