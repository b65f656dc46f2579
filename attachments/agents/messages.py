"""Messages between a run and the worker processes of an environment.

A worker answers every request with one message. `number` names an episode.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from protocols.prompt import Problem
from training_run.episodes.messages import Ask, EpisodeEnded, Failed, PolicyTurn
from training_run.supervision.guarded_process import ProcessSettings


class EnvironmentSettings(ProcessSettings, frozen=True, kw_only=True):
    """Run -> worker. environment: its name in the profile. step_seconds: time limit between two messages."""

    environment: str
    step_seconds: float


class Describe(Struct, frozen=True, kw_only=True, tag=True):
    """Run -> worker. Describe tools and columns; the answer is `Described` or `Failed`."""


class Begin(Struct, frozen=True, kw_only=True, tag=True):
    """Run -> worker. Begin an episode."""

    number: int
    problem: Problem


class Continue(Struct, frozen=True, kw_only=True, tag=True):
    """Run -> worker. The policy has answered."""

    number: int
    turn: PolicyTurn


class Forget(Struct, frozen=True, kw_only=True, tag=True):
    """Run -> worker. The episode has ended in the run; the answer is `EpisodeEnded`."""

    number: int


Request = Describe | Begin | Continue | Forget


class Loaded(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> run. The environment is imported."""


class Described(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> run. tools: definitions in the format of the OpenAI API. required: columns that `reset` needs."""

    tools: tuple[dict[str, Any], ...]
    required: tuple[str, ...] = ()


Answer = Loaded | Described | Ask | EpisodeEnded | Failed
