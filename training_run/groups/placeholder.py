"""The prompt of a group that was not made from a prompt of the run."""

from __future__ import annotations

from protocols.prompt import Problem, Prompt


def placeholder_prompt(group_id: int, source: str) -> Prompt:
    """Return the prompt of a group whose contents are not kept."""
    return Prompt(
        group_id=group_id, problem=Problem(prompt="", answer="", type=source), tokens=(), seed=0, source=source
    )
