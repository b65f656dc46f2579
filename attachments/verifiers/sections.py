"""The settings of tasksets of verifiers in a profile."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from clotho.settings.bounds import NonNegative, Positive, PositiveFloat, about
from clotho.settings.mounted import Setting

VERIFIERS = "verifiers:"
"""Start of `data.train` for a taskset of verifiers; its name follows."""


class VerifiersSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The taskset that data.train names, and the process that plays it."""

    python: Annotated[str, about("Interpreter with verifiers 0.4.0; empty: that of the run.")] = ""
    directory: Annotated[str, about("Directory of tasksets that are not installed; empty: none.")] = ""
    tasks: Annotated[NonNegative, about("Number of tasks, the first ones; 0: all of a finite taskset.")] = 0
    settings: Annotated[dict[str, Any], about("Settings of the taskset, such as { game = 'Wordle-v0' }.")] = {}
    environment: Annotated[dict[str, Any], about("Settings of the environment, and of its agents by name.")] = {}
    max_turns: Annotated[Positive, about("Messages of the policy in a task; then it ends, and is rewarded.")] = 16
    max_tokens: Annotated[Positive, about("Tokens of a conversation, of its prompt and its environment too.")] = 2048
    step_seconds: Annotated[PositiveFloat, about("Time limit of a task between two messages.")] = 120.0
    memory_limit_mb: Annotated[Positive, about("Memory limit of the process that plays tasks.")] = 8192


TASKSET = Setting[VerifiersSection](
    path="data.verifiers",
    kind=VerifiersSection,
    default=VerifiersSection(),
    attachment="verifiers",
    after="reasoning_gym",
    paths={"data.verifiers.python": "caller", "data.verifiers.directory": "input"},
)

SETTINGS = (TASKSET,)
