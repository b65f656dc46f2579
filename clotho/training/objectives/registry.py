"""Objectives by name: the built-in ones, and `module:function` from the Python path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from clotho.config.nearest import did_you_mean
from clotho.config.schema import LearnerSection
from clotho.runtime.user_code import import_user_module
from clotho.training.objectives.contract import Objective, PolicyLoss, Tokens
from clotho.training.objectives.sequence_level import gspo, gspo_token, rloo
from clotho.training.objectives.token_level import (
    bnpo,
    cispo,
    dapo,
    dppo_tv,
    dr_grpo,
    grpo,
    ppo_decoupled,
    reinforce,
    reinforce_plus_plus,
    sapo,
)
from protocols.errors import ProfileError

OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "bnpo": bnpo,
        "dapo": dapo,
        "gspo": gspo,
        "gspo_token": gspo_token,
        "cispo": cispo,
        "rloo": rloo,
        "reinforce": reinforce,
        "reinforce_plus_plus": reinforce_plus_plus,
        "ppo_decoupled": ppo_decoupled,
        "dppo_tv": dppo_tv,
        "sapo": sapo,
    }
)
"""`learner.objective` -> objective(log pi, tokens, settings)."""


def objective(name: str) -> Objective:
    """Return the objective that a profile names; see `tokens` for the contract that one of your own must keep.

    Raises ProfileError where there is none of that name, it cannot be imported, or it does not take three arguments.
    One of your own that returns anything but a PolicyLoss of (N,) arrays raises ProfileError when it is called.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ProfileError(f"learner.objective {name!r} is unknown{did_you_mean(name, OBJECTIVES)}; {_allowed()}")
    try:
        function = getattr(import_user_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise ProfileError(
            f"learner.objective {name!r} cannot be imported: {type(error).__name__}: {error}; {_allowed()}"
        ) from error
    _require_three_arguments(name, function)
    return _checked(name, function)


def _allowed() -> str:
    return f"allowed are {', '.join(OBJECTIVES)}, or module:function"


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
    """Refuse results that broadcasting would make something of: a mean where the losses of tokens belong."""

    def checked(logp_N: mx.array, tokens: Tokens, settings: LearnerSection) -> PolicyLoss:
        result = function(logp_N, tokens, settings)
        if not isinstance(result, PolicyLoss) or any(getattr(part, "shape", None) != logp_N.shape for part in result):
            raise ProfileError(f"learner.objective {name!r} must return a PolicyLoss of two arrays of {logp_N.shape}")
        return result

    return checked
