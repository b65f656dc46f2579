"""Extraction of the answer from a completion."""

from __future__ import annotations

THINK, THINK_END = "<think>", "</think>"
ANSWER, ANSWER_END = "<answer>", "</answer>"


def answer_text(completion: str) -> str | None:
    """Return the text inside the last `<answer>` element, stripped; None if there is no complete element.

    An element without a closing tag does not count: the token limit truncated the answer. An element inside an open
    `<think>` does not count either. Do not use `</answer>` as a stop string: stop strings are removed from the text.
    """
    start = completion.rfind(ANSWER)
    end = completion.find(ANSWER_END, start)
    if start < 0 or end < 0:
        return None
    think = completion.rfind(THINK, 0, start)
    if think >= 0 and completion.find(THINK_END, think, start) < 0:
        return None
    return completion[start + len(ANSWER) : end].strip()
