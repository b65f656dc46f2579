"""docs/recipes.md: its reward of tool calls gives the rewards that the page states."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols.prompt import Problem
from tests.docs.pages import DOCS, blocks

[CODE] = [block.text for block in blocks(DOCS / "recipes.md") if block.file_name == "tool_calls.py"]
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
PROBLEM = Problem(prompt="Oslo?", answer=json.dumps(CALL), type="call", extra={"tools": TOOLS})


def marked(call: object) -> str:
    """A call as a model writes it."""
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (marked(CALL), 1.0),
        (marked(CALL | {"arguments": {"city": "Lima"}}), 0.2),
        (marked(CALL | {"name": "mail"}), 0.0),
        (marked(CALL) + marked(CALL), 0.0),
        ("<tool_call>{not JSON}</tool_call>", 0.0),
        ("It rains.", 0.0),
    ],
)
def test_the_reward_of_tool_calls(completion: str, reward: float) -> None:
    """The whole reward for the expected call, a part for another call of a known tool."""
    namespace: dict[str, Any] = {}
    exec(CODE, namespace)
    assert namespace["right_call"](PROBLEM, completion) == reward
