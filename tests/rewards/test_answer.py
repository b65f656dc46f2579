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
def test_the_answer_is_the_last_closed_one_outside_of_thoughts(completion: str, answer: str | None) -> None:
    """An answer that is cut off, or stands in a thought still open, is none."""
    assert answer_text(completion) == answer


def test_ten_thousand_tags_are_read_in_linear_time() -> None:
    """The text is foreign: no repetition of tags may cost more than reading it."""
    assert answer_text("<think><answer>" * 100_000) is None
    assert answer_text("<answer>" * 100_000 + "1</answer>") == "1"
