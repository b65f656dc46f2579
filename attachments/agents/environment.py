"""The environments that users write, and how each of them acts in a conversation with the policy.

Three forms are accepted:

* a class, or a function that returns an object. Its public methods are tools, except those named below. All of the
  following are optional, and may be asynchronous:

      reset(**columns)   begins an episode of a problem; a text that it returns is added to the prompt
      step(text)         answers a message without calls, with the next message of the user; None ends the episode
      done               true once the episode should end
      reward             the reward, or a method that returns it; read when the episode has ended
      turn_rewards       the rewards of the policy's messages, in order, or a method that returns them; those that are
                         missing at the end are 0

* a list of functions: tools without an environment. The reward comes from other reward functions.
* an asynchronous function of (problem, chat), which leads the conversation itself, and returns the reward.

`reset`, tools and `reward` are those of TRL's `environment_factory`.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any

from protocols.prompt import Problem
from training_run.episodes.messages import Ask, EpisodeEnded, PolicyTurn

OWN = frozenset({"reset", "step", "done", "reward", "turn_rewards"})
"""Public names of an environment that are no tools."""

MAX_RESULT = 32_768
"""Characters of a result of a tool."""

MAX_IGNORED = 8
"""How often a function may ask for another message after the end of its episode."""

AskPolicy = Callable[[Ask], Awaitable[PolicyTurn]]
"""Asks the policy for a message."""


class EnvironmentFailed(Exception):
    """The environment did not do what it must."""


class PolicyChat:
    """The conversation of an episode, as a function of the user leads it."""

    def __init__(self, ask: AskPolicy) -> None:
        self._ask, self._ignored = ask, 0

    async def __call__(self, *messages: str | Mapping[str, Any], begin: bool = False) -> PolicyTurn:
        """Return the next message of the policy. messages: texts of the user, or messages with a role, before it.

        Texts of the first call are added to the prompt. begin: they are the whole conversation instead, for example
        with a summary of what was said; the messages before are kept as a row of their own, with the same reward. When
        the episode has reached a limit, messages are empty and have `finish = "limit"`.
        """
        written = tuple({"role": "user", "content": one} if isinstance(one, str) else dict(one) for one in messages)
        turn = await self._ask(Ask(messages=written, whole=begin))
        if turn.finish == "limit":
            self._ignored += 1
            if self._ignored > MAX_IGNORED:
                raise EnvironmentFailed(f"it has asked for {self._ignored} messages after the end of the episode")
        return turn


def tools_of(target: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment: functions by name."""
    if isinstance(target, list | tuple):
        return {function.__name__: function for function in target}
    if inspect.iscoroutinefunction(target):
        return {}
    members = inspect.getmembers(target() if not inspect.isclass(target) else target, callable)
    return {name: member for name, member in members if not name.startswith("_") and name not in OWN}


def described(target: Any) -> tuple[dict[str, Any], ...]:
    """Return the definitions of the tools. Raises EnvironmentFailed for a tool without types or descriptions."""
    found, tools = [], tools_of(target)
    if tools:
        from transformers.utils.chat_template_utils import get_json_schema  # takes 0.7 s
    for name, function in tools.items():
        try:
            schema = get_json_schema(function)["function"]
        except Exception as error:
            raise EnvironmentFailed(f"the tool {name} has no description: {error}") from error
        found.append({"type": "function", "function": {key: schema[key] for key in schema if key != "return"}})
    return tuple(found)


def required_columns(target: Any) -> tuple[str, ...]:
    """Return the parameters without a default of `reset`, which are columns that the dataset must have."""
    if isinstance(target, list | tuple) or inspect.iscoroutinefunction(target):
        return ()
    owner = target if inspect.isclass(target) else target()
    if not hasattr(owner, "reset"):
        return ()
    has_self = inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, "reset"))
    parameters = list(inspect.signature(owner.reset).parameters.values())[has_self:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return tuple(one.name for one in named if one.default is one.empty)


async def play(target: Any, problem: Problem, ask: AskPolicy) -> EpisodeEnded:
    """Lead one episode; return its rewards. Raises what the code of the user raises, and EnvironmentFailed."""
    if inspect.iscoroutinefunction(target):
        return EpisodeEnded(reward=_number(await target(problem, PolicyChat(ask))))
    environment = None if isinstance(target, list | tuple) else target()
    await _converse(environment, tools_of(target if environment is None else type(environment)), problem, ask)
    reward, of_turns = await _value(environment, "reward"), await _value(environment, "turn_rewards")
    return EpisodeEnded(reward=_number(reward), turn_rewards=tuple(_number(one) or 0.0 for one in of_turns or ()))


async def _value(environment: Any, name: str) -> Any:
    found = getattr(environment, name, None)
    return await _result(found() if callable(found) else found)


async def _converse(
    environment: Any, tools: Mapping[str, Callable[..., Any]], problem: Problem, ask: AskPolicy
) -> None:
    begin, step = getattr(environment, "reset", None), getattr(environment, "step", None)
    first = await _result(begin(**_accepted(begin, problem.extra))) if begin is not None else None
    turn = await ask(Ask(messages=() if first is None else ({"role": "user", "content": str(first)},)))
    while turn.finish == "stop" and (turn.calls or step is not None):
        if turn.calls:
            results = [await _called(environment, tools, call.name, call.arguments) for call in turn.calls]
            names = [{"role": "tool", "tool_call_id": call.id, "name": call.name} for call in turn.calls]
            messages = [{**name, "content": text} for name, (text, _) in zip(names, results, strict=True)]
            errors = sum(failed for _, failed in results)
        else:
            assert step is not None
            text, errors = await _result(step(turn.content)), 0
            if text is None:
                return
            messages = [{"role": "user", "content": str(text)}]
        if getattr(environment, "done", False):
            return
        turn = await ask(Ask(messages=tuple(messages), tool_errors=errors))


async def _called(
    environment: Any, tools: Mapping[str, Callable[..., Any]], name: str, arguments: str
) -> tuple[str, bool]:
    """Return the result of a tool as text, and whether the call failed. The policy reads why."""
    try:
        if name not in tools:
            raise ValueError(f"there is no tool {name[:64]!r}; tools: {', '.join(tools)}")
        function = tools[name] if environment is None else getattr(environment, name)
        result = await _result(function(**json.loads(arguments or "{}")))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:MAX_RESULT], True
    return (result if isinstance(result, str) else json.dumps(result, default=str))[:MAX_RESULT], False


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _accepted(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(columns)
    return {one.name: columns[one.name] for one in parameters if one.name in columns}


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) or not math.isfinite(float(value)):
        raise EnvironmentFailed(f"its reward is {value!r}, and not a finite number")
    return float(value)
