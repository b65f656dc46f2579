"""Messages between a run and the worker processes of an environment.

A worker answers every request with one message. `number` names an episode.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from clotho.extension import SampledCall
from protocols.prompt import Problem
from training_run.supervision.guarded_process import ProcessSettings

Finish = Literal["stop", "length", "limit"]


class PolicyTurn(Struct, frozen=True, kw_only=True):
    """A message of the policy. content: its text without reasoning and calls.

    finish: `stop` if the policy ended it; `length` if the limit on tokens did; `limit` if the episode has ended, and
    the message is empty. After `length` and `limit`, the policy writes no further message.
    """

    content: str
    reasoning: str = ""
    calls: tuple[SampledCall, ...] = ()
    finish: Finish = "stop"


class EnvironmentSettings(ProcessSettings, frozen=True, kw_only=True):
    """Run -> worker. environment: its name in the profile. step_seconds: time limit between two messages."""

    environment: str
    step_seconds: float


class Describe(Struct, frozen=True, kw_only=True, tag=True):
    """Run -> worker. Describe the tools; the answer is `Described` or `Failed`."""


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
    """Worker -> run. Definitions of the tools in the format of the OpenAI API."""

    tools: tuple[dict[str, Any], ...]


class Ask(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> run. Ask the policy for a message. messages: what comes before it, of the roles `user` and `tool`.

    Before the first message of the policy, their contents are added to the last message of the prompt; there may be
    none. tool_errors: number of calls since the last message that failed.
    """

    messages: tuple[dict[str, Any], ...]
    tool_errors: int = 0


class EpisodeEnded(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> run. The episode has ended. reward: None if the environment gives none. turn_rewards: as given."""

    reward: float | None = None
    turn_rewards: tuple[float, ...] = ()


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> run. The environment raised, or did not answer as it must. traceback: of the exception."""

    message: str
    traceback: str = ""


Answer = Loaded | Described | Ask | EpisodeEnded | Failed
