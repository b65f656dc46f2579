"""Registry of reward functions: the built-in names, and import of functions from the user's code."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

from clotho.rewards import choice_correctness, exact, jaccard, last_number, math_eval, tag_format
from clotho.runtime.user_code import import_user_module
from protocols.errors import ProfileError, did_you_mean
from protocols.prompt import Problem

RewardFunction = Callable[[Problem, str], float | Awaitable[float | None] | None]
"""Signature of a reward function; `clotho.rewards` documents it."""

BUILT_IN: dict[str, RewardFunction] = {
    "format": tag_format.reward,
    "math_eval": math_eval.reward,
    "last_number": last_number.reward,
    "jaccard": jaccard.reward,
    "choice_correctness": choice_correctness.reward,
    "exact": exact.reward,
}
"""Built-in reward functions: synchronous, and with a bounded cost for every text."""

ANSWER_REWARDS = ("math_eval", "jaccard", "choice_correctness", "exact")
"""Built-in functions that read the answer inside <answer>...</answer>."""

EXPECTED = {
    "format": "<think>...</think><answer>...</answer>, and nothing else",
    "math_eval": "the value of the answer inside <answer>...</answer>",
    "last_number": "the answer as the last number of the text",
    "jaccard": "words of the answer inside <answer>...</answer>",
    "choice_correctness": "the letter or text of the correct option inside <answer>...</answer>",
    "exact": "the answer itself inside <answer>...</answer>",
}
"""What a built-in function expects of a completion."""

ALLOWED = f"use {', '.join(BUILT_IN)}, module:function, or path/to/file.py:function"


def load_reward(name: str) -> RewardFunction:
    """Return the reward function with a name from the profile.

    `name` is a key of `BUILT_IN`, `module:function`, or `path/to/file.py:function`. Raises ProfileError if the name is
    unknown, the module cannot be imported, or the function does not accept (problem, completion).
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, attribute = split_name(name)
    return _function(name, _module(name, module_name), attribute)


def split_name(name: str) -> tuple[str, str]:
    """Return the module or file and the function of a name that is not built in. Raises ProfileError."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        raise ProfileError(f"rewards.name {name!r} is unknown{did_you_mean(name, BUILT_IN)}; {ALLOWED}")
    if not module_name or not attribute.isidentifier():
        raise ProfileError(f"rewards.name {name!r} is malformed; {ALLOWED}")
    return module_name, attribute


def is_async(function: RewardFunction) -> bool:
    """Return whether a call of the function returns an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _module(name: str, module_name: str) -> ModuleType:
    try:
        return _import_file(Path(module_name)) if module_name.endswith(".py") else import_user_module(module_name)
    except (Exception, SystemExit) as error:
        raise ProfileError(
            f"rewards.name {name!r}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    """Import a Python file; a second import of the same file returns the same module."""
    path = path.expanduser().resolve()
    module_name = f"reward_file:{path}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _function(name: str, module: ModuleType, attribute: str) -> RewardFunction:
    if not hasattr(module, attribute):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise ProfileError(
            f"rewards.name {name!r}: module {module.__name__!r} has no {attribute!r}"
            f"{did_you_mean(attribute, functions)}"
        )
    function = getattr(module, attribute)
    if not callable(function):
        raise ProfileError(f"rewards.name {name!r} is not a function but a value of type {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a callable without an inspectable signature, such as some C functions
        signature = None
    try:
        if signature is not None:
            signature.bind(Problem(prompt="", answer="", type=""), "")
    except TypeError as error:
        raise ProfileError(f"rewards.name {name!r} does not accept (problem, completion): {error}") from None
    loaded: RewardFunction = function
    return loaded
