from __future__ import annotations

import pytest

from clotho.rewards.answer import answer_text


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>a</think><answer> 42 </answer>", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("42", None),
        ("", None),
        ("<answer>42", None),
        ("<answer>1</answer><answer>42", None),
        ("</answer>42<answer>", None),
        ("<ANSWER>42</ANSWER>", None),
        ("<think>perhaps <answer>42</answer>", None),
        ("<think>a</think> again <think>b <answer>42</answer></think>", None),
        ("a</think><answer>42</answer>", "42"),
    ],
)
def test_answer_text_returns_the_last_complete_answer_outside_think(completion: str, answer: str | None) -> None:
    """A truncated answer, or an answer inside an open `<think>`, does not count."""
    assert answer_text(completion) == answer


def test_many_tags_terminate() -> None:
    """The cost is linear in the length of the text."""
    assert answer_text("<think><answer>" * 100_000) is None
    assert answer_text("<answer>" * 100_000 + "1</answer>") == "1"
