"""Objectives by their settings: the built-in ones, and `module:function` from the Python path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from clotho.settings import objectives as settings
from clotho.training.objectives import sequence_level, token_level
from clotho.training.objectives.contract import Objective, ObjectiveInputs, PolicyLoss
from clotho.user_code import import_user_module
from protocols.errors import ProfileError

OBJECTIVES: Mapping[type[settings.ObjectiveSettings], Objective] = {
    **token_level.OBJECTIVES,
    **sequence_level.OBJECTIVES,
}
"""The objective function of each struct: objective(log pi, tokens, settings)."""


def objective(chosen: settings.Objective) -> Objective:
    """Return the objective function of these settings; see `contract` for what a custom function must return.

    Raises ProfileError if a custom function cannot be imported or does not take three arguments. A custom function that
    returns anything but a PolicyLoss of (N,) arrays raises ProfileError when it is called.
    """
    if not isinstance(chosen, settings.Custom):
        return OBJECTIVES[type(chosen)]
    name = chosen.function
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(import_user_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise ProfileError(f"learner.objective {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    _require_three_arguments(name, function)
    return _checked(name, function)


def _require_three_arguments(name: str, function: Any) -> None:
    if not callable(function):
        raise ProfileError(f"learner.objective {name!r} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise ProfileError(
            f"learner.objective {name!r} cannot be called with (logp_N, tokens, settings): {error}"
        ) from None


def _checked(name: str, function: Objective) -> Objective:
    """Refuse results of another shape, which broadcasting would accept, such as a mean over tokens."""

    def checked(logp_N: mx.array, tokens: ObjectiveInputs, settings: Any) -> PolicyLoss:
        result = function(logp_N, tokens, settings)
        if not isinstance(result, PolicyLoss) or any(getattr(part, "shape", None) != logp_N.shape for part in result):
            raise ProfileError(f"learner.objective {name!r} must return a PolicyLoss of two arrays of {logp_N.shape}")
        return result

    return checked
