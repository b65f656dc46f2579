"""Reward `format`: the completion has the form `<think>...</think><answer>...</answer>`."""

from __future__ import annotations

from clotho.rewards.answer import ANSWER, ANSWER_END, THINK, THINK_END
from protocols.prompt import Problem


def reward(problem: Problem, completion: str) -> float:
    """Return 1.0 if the completion is one `<think>` element followed by one `<answer>` element, otherwise 0.0.

    Only white space may surround the two elements, and neither may be blank. There is no partial credit, so that the
    tags alone earn nothing. If the chat template opens `<think>` in the prompt, the completion lacks that tag and the
    reward is always 0.0.
    """
    del problem
    if any(completion.count(tag) != 1 for tag in (THINK, THINK_END, ANSWER, ANSWER_END)):
        return 0.0
    before, _, rest = completion.partition(THINK)
    thought, think_closed, rest = rest.partition(THINK_END)
    between, answer_opened, rest = rest.partition(ANSWER)
    answer, answer_closed, after = rest.partition(ANSWER_END)
    in_order = bool(think_closed and answer_opened and answer_closed)
    outside = before.strip() or between.strip() or after.strip()
    return float(in_order and not outside and bool(thought.strip()) and bool(answer.strip()))
