"""Where the answer of a completion stands."""

from __future__ import annotations

THINK, THINK_END = "<think>", "</think>"
ANSWER, ANSWER_END = "<answer>", "</answer>"


def answer_text(completion: str) -> str | None:
    """Return the text inside the last `<answer>` of a completion, stripped; None where there is no such answer.

    The tag must be closed: an answer cut off by the token limit is none. It must not stand inside a `<think>` that is
    still open: a thought is not an answer. `</answer>` must therefore not be a stop string, which is removed from the
    text.
    """
    start = completion.rfind(ANSWER)
    end = completion.find(ANSWER_END, start)
    if start < 0 or end < 0:
        return None
    thought = completion.rfind(THINK, 0, start)
    if thought >= 0 and completion.find(THINK_END, thought, start) < 0:
        return None
    return completion[start + len(ANSWER) : end].strip()
