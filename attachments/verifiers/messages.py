"""Messages between a run and the process that plays tasks. `number` names an episode.

The process is `taskset_program.py`, which knows them as MessagePack maps.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from training_run.episodes.messages import Ask, EpisodeEnded, Failed, PolicyTurn
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
