"""What an environment and the policy say to each other in an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from msgspec import Struct

from protocols.prompt import Problem

Finish = Literal["stop", "length", "limit"]
Credit = Literal["episode", "turn"]


class EpisodeLimits(Struct, frozen=True, kw_only=True):
    """Limits of an episode: messages of the policy, and tokens of a row. credit: what advantages follow from."""

    max_turns: int
    max_tokens: int
    credit: Credit = "episode"


class SampledCall(Struct, frozen=True, kw_only=True):
    """A call of a tool in a message. arguments: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class PolicyTurn(Struct, frozen=True, kw_only=True):
    """A message of the policy. content: its text without reasoning and calls.

    finish: `stop` if the policy ended it; `length` if the limit on tokens did; `limit` if the episode has ended, and
    the message is empty. After `length` and `limit`, the policy writes no further message, unless the environment
    begins a conversation anew after `length`.
    """

    content: str
    reasoning: str = ""
    calls: tuple[SampledCall, ...] = ()
    finish: Finish = "stop"


class Ask(Struct, frozen=True, kw_only=True, tag=True):
    """Environment -> run. Ask the policy for a message.

    messages: what comes before it, of the roles `user` and `tool`. Before the first message of the policy, their
    contents are added to the last message of the prompt of the problem; there may be none. whole: they are all messages
    of a conversation instead, also of the roles `system` and `assistant`. If it has begun, it begins anew (a fork):
    what was sampled before is a row of its own. conversation: name of one of several conversations of an episode.
    tools: definitions of functions for the template, if `whole`. tool_errors: number of calls since the last message
    that failed.
    """

    messages: tuple[dict[str, Any], ...]
    tool_errors: int = 0
    conversation: str = ""
    whole: bool = False
    tools: tuple[dict[str, Any], ...] = ()


class EpisodeEnded(Struct, frozen=True, kw_only=True, tag=True):
    """Environment -> run. The episode has ended. reward: None if the environment gives none. turn_rewards: as given.

    rewards: of single conversations, if not all of them have `reward`; others are not trained on. Empty: all have it.
    """

    reward: float | None = None
    turn_rewards: tuple[float, ...] = ()
    rewards: Mapping[str, float] = {}


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """Environment -> run. The environment raised, or did not answer as it must. traceback: of the exception."""

    message: str
    traceback: str = ""


Event = Ask | EpisodeEnded | Failed
"""What an environment does next."""


class EpisodeEnvironment(Protocol):
    """The environment of one episode."""

    async def begin(self) -> Event:
        """Return what the environment does first."""
        ...

    async def go_on(self, turn: PolicyTurn, /) -> Event:
        """Pass a message of the policy on; return what the environment does next."""
        ...

    async def close(self) -> None:
        """Forget the episode."""
        ...


class Environments(Protocol):
    """Makes the environments of episodes."""

    def episode(self, problem: Problem, /) -> EpisodeEnvironment:
        """Return the environment of an episode that has not begun."""
        ...
