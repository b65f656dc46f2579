"""Prompter -> generator: the prompt of a group of completions, and the seeds of the run."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from protocols.sampling import derive

AnswerIn = Literal["tags", "boxed", "hashes", "last_number", "text"]
"""Where the answer of a completion is found; `clotho.rewards.answer` defines each place."""


class Problem(Struct, frozen=True, kw_only=True):
    """One record of a dataset.

    prompt: the text of the last message before the completion. answer: the expected answer; empty if it has none.
    type: selects the reward functions that apply; empty: those without a list of types.
    messages: the whole conversation before the completion, if the record is a conversation; otherwise empty.
    tools: definitions of functions for the chat template. extra: all columns of the record under their names in the
    dataset, as JSON values. completion: a reference completion, for the held-out loss; empty if the record has none.
    """

    prompt: str
    answer: str = ""
    type: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = {}
    completion: str = ""


class Prompt(Struct, frozen=True, kw_only=True, tag=True):
    """Prompter -> generator. The prompt of group `group_id`: a pure function of (profile, seed, group_id).

    If an attachment chooses the problems, the problem also depends on the groups that were scored before.
    group_id: serial number of the group, from 0.
    tokens: the rendered chat prompt; never empty.
    seed: seed for all random choices of the group.
    source: name of the environment that sent the group; empty for the run's own dataset.
    """

    group_id: int
    problem: Problem
    tokens: tuple[int, ...]
    seed: int
    source: str = ""


def group_seed(run_seed: int, group_id: int) -> int:
    """The seed of one group."""
    return derive(run_seed, "group", group_id)


def placeholder_prompt(group_id: int, source: str) -> Prompt:
    """Return the prompt of a group whose contents are not kept, of an environment."""
    return Prompt(
        group_id=group_id, problem=Problem(prompt="", answer="", type=source), tokens=(), seed=0, source=source
    )
