"""Prompter -> generator: one question to be answered by a group of completions."""

from __future__ import annotations

from msgspec import Struct


class Problem(Struct, frozen=True, kw_only=True):
    """One line of a dataset. `type` names the kind of problem and selects the rewards that apply to it."""

    prompt: str
    answer: str
    type: str


class Prompt(Struct, frozen=True, kw_only=True, tag=True):
    """Prompter -> generator. Group `group_id` of the run; a pure function of (profile, seed, group_id).

    group_id: serial number, from 0.
    tokens: the rendered chat prompt, as the policy's tokenizer encodes it; never empty.
    seed: every random choice inside the group derives from it.
    source: the environment that the group comes from; empty where the run itself asked it.
    """

    group_id: int
    problem: Problem
    tokens: tuple[int, ...]
    seed: int
    source: str = ""
