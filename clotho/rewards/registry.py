"""Reward functions by name: the built-in ones, and `module:function` from the Python path."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from types import ModuleType

from clotho.rewards import choice_correctness, exact, format, jaccard, math_eval  # noqa: A004
from clotho.runtime.user_code import import_user_module
from protocols.errors import ProfileError
from protocols.prompt import Problem

RewardFunction = Callable[[Problem, str], float | Awaitable[float | None] | None]

BUILT_IN: dict[str, RewardFunction] = {
    "format": format.reward,
    "math_eval": math_eval.reward,
    "jaccard": jaccard.reward,
    "choice_correctness": choice_correctness.reward,
    "exact": exact.reward,
}
"""The functions that come with Clotho; all synchronous, fast, and bounded for any text."""


def load_reward(name: str) -> RewardFunction:
    """Return the function that a profile names; see the package for the contract it must keep.

    Raises ProfileError where there is none of that name, its module cannot be imported, or it cannot be called with a
    problem and a completion.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ProfileError(f"rewards.name {name!r} is unknown{_nearest(name, BUILT_IN)}; {_allowed()}")
    if not module_name or not attribute.isidentifier():
        raise ProfileError(f"rewards.name {name!r} is malformed; {_allowed()}")
    return _function(name, _module(name, module_name), attribute)


def is_async(function: RewardFunction) -> bool:
    """Say whether calling the function gives something to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _allowed() -> str:
    return f"allowed are {', '.join(BUILT_IN)}, or module:function"


def _nearest(name: str, names: list[str] | dict[str, RewardFunction]) -> str:
    near = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def _module(name: str, module_name: str) -> ModuleType:
    try:
        return import_user_module(module_name)
    except (Exception, SystemExit) as error:
        raise ProfileError(
            f"rewards.name {name!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _function(name: str, module: ModuleType, attribute: str) -> RewardFunction:
    if not hasattr(module, attribute):
        functions = [key for key, value in vars(module).items() if callable(value)]
        near = _nearest(attribute, functions)
        raise ProfileError(f"rewards.name {name!r}: module {module.__name__!r} has no {attribute!r}{near}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ProfileError(f"rewards.name {name!r} is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:
        signature = None
    try:
        if signature is not None:
            signature.bind(Problem(prompt="", answer="", type=""), "")
    except TypeError as error:
        raise ProfileError(f"rewards.name {name!r} cannot be called with (problem, completion): {error}") from None
    loaded: RewardFunction = function
    return loaded
