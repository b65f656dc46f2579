"""Registry of reward functions: the built-in names, and import of functions from the user's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from clotho.extension import TableDoor, provided
from clotho.user_code import load_named
from protocols.errors import ProfileError, did_you_mean
from protocols.prompt import AnswerIn, Problem

RewardFunction = Callable[..., Any]
"""A reward function of one completion or of a group; `clotho.rewards` documents both signatures."""


class RewardOptions(Struct, frozen=True, kw_only=True):
    """What a function is loaded with: keys of its section, and `max_steps`, the steps of the run."""

    answer_in: AnswerIn = "tags"
    settings: dict[str, Any] = {}
    timeout_seconds: float = 10.0
    max_steps: int = 0


class BuiltIn(Struct, frozen=True, kw_only=True):
    """A built-in function.

    expects: what it expects of a completion; `{place}` stands for the place of the answer, if it reads the answer.
    place: `module:name` of a function with a bounded cost for every text, which runs in threads; empty if it runs in
    worker processes. load: `module:name` of what loads such a function. It is called with the `RewardOptions`, imports
    what the function needs, returns it, and raises ProfileError. has_settings: whether it accepts `settings`. computes:
    whether `load` returns what scores groups with a model of its own, in the compute threads of the run, in place of a
    function.
    """

    expects: str
    place: str = ""
    load: str = ""
    has_settings: bool = False
    computes: bool = False

    @property
    def reads_answer(self) -> bool:
        """Whether the value depends on the answer that `answer_in` finds."""
        return "{place}" in self.expects

    @property
    def function(self) -> RewardFunction | None:
        """The function that runs in threads, imported; None if there is none."""
        function: RewardFunction | None = provided(self.place) if self.place else None
        return function


def environment_reward(
    completions: Sequence[object], environment_rewards: Sequence[float | None] = ()
) -> Sequence[float | None]:
    """Return the reward that the environment of each completion gave; None where there was none."""
    return environment_rewards or [None] * len(completions)


CORE: Mapping[str, BuiltIn] = {
    "format": BuiltIn(
        expects="<think>...</think><answer>...</answer>, and nothing else", place="clotho.rewards.tag_format:reward"
    ),
    "environment": BuiltIn(
        expects="what the environment of an episode gives", place="clotho.rewards.registry:environment_reward"
    ),
    "exact": BuiltIn(expects="the answer itself {place}", place="clotho.rewards.exact:reward"),
}
"""Built-in reward functions of the library."""

REWARDS: TableDoor[BuiltIn] = TableDoor(
    "library.REWARDS",
    dict.fromkeys(("choice_correctness", "jaccard", "judge", "math_eval", "math_verify"), "graders")
    | {"reasoning_gym": "reasoning_gym", "reward_model": "reward_model"},
)
"""Built-in reward functions of attachments."""


def built_in() -> Mapping[str, BuiltIn]:
    """Return the built-in reward functions by name: those of the library, and those of attachments."""
    return {**CORE, **REWARDS()}


LISTS = frozenset({"prompts", "completions", "completion_ids", "environment_rewards"})
"""Parameters by which a function of a group is recognized."""

ARGUMENTS = LISTS | {"trainer_state"}
"""Arguments of a function of a group beside the columns of the dataset."""


def load_reward(name: str, options: RewardOptions | None = None, *, file: str = "") -> RewardFunction:
    """Return the reward function with a name from the profile.

    `name` is a key of `built_in`, `module:function`, or `path/to/file.py:function`. file: a copy of the file that
    contains the function, to import in its place. Raises ProfileError if the name is unknown, the module or a library
    that it needs cannot be imported, or the function has another signature.
    """
    options = options or RewardOptions()
    found = built_in().get(name)
    if found is None:
        split_name(name)
        return _function(name, load_named(name, "rewards.name", file=file))
    function: RewardFunction = found.function or provided(found.load)(options)
    return partial(function, answer_in=options.answer_in) if found.place and found.reads_answer else function


def split_name(name: str) -> tuple[str, str]:
    """Return the module or file and the function of a name that is not built in. Raises ProfileError."""
    module_name, colon, attribute = name.rpartition(":")
    if not colon and (reason := REWARDS.absence(name)):
        raise ProfileError(f"rewards.name {name!r} {reason}")
    names = built_in()
    allowed = f"use {', '.join(names)}, module:function, or path/to/file.py:function"
    if not colon:
        raise ProfileError(f"rewards.name {name!r} is unknown{did_you_mean(name, names)}; {allowed}")
    if not module_name or not attribute.isidentifier():
        raise ProfileError(f"rewards.name {name!r} is malformed; {allowed}")
    return module_name, attribute


def is_async(function: RewardFunction) -> bool:
    """Return whether a call of the function returns an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class GroupParameters(Struct, frozen=True, kw_only=True):
    """The parameters of a function that is called once per group, with lists, as by GRPOTrainer of TRL.

    names: of the parameters. required: of those without a default. takes_all: whether it accepts any other name.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool

    def accepts(self, name: str) -> bool:
        """Whether an argument of this name can be passed."""
        return self.takes_all or name in self.names


def group_parameters(function: RewardFunction) -> GroupParameters | None:
    """Return the parameters of a function of a whole group; None for a function of (problem, completion).

    A function of a group has a parameter of `LISTS`, or nothing but `**kwargs`.
    """
    signature = _signature(function)
    if signature is None:
        return None
    parameters = signature.parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    names = tuple(one.name for one in named)
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if not set(names) & LISTS and not (takes_all and len(signature.parameters) == 1):
        return None
    required = tuple(one.name for one in named if one.default is one.empty)
    return GroupParameters(names=names, required=required, takes_all=takes_all)


def _function(name: str, function: Any) -> RewardFunction:
    if not callable(function):
        raise ProfileError(f"rewards.name {name!r} is not a function but a value of type {type(function).__name__}")
    loaded: RewardFunction = function
    if group_parameters(loaded) is None and (problem := _signature_error(loaded)):
        raise ProfileError(
            f"rewards.name {name!r} accepts neither (problem, completion) nor a list of completions: {problem}"
        )
    return loaded


def _signature_error(function: RewardFunction) -> str:
    """Return why a function does not accept (problem, completion); empty if it does."""
    signature = _signature(function)
    try:
        if signature is not None:
            signature.bind(Problem(prompt=""), "")
    except TypeError as error:
        return str(error)
    return ""


def _signature(function: RewardFunction) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # a callable without an inspectable signature, such as some C functions
        return None
