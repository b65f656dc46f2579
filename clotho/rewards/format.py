"""The reward for the form `<think>...</think><answer>...</answer>`."""

from __future__ import annotations

from clotho.rewards.answer import ANSWER, ANSWER_END, THINK, THINK_END
from protocols.prompt import Problem


def reward(problem: Problem, completion: str) -> float:
    """Return 1.0 for exactly one thought followed by exactly one answer and nothing else, otherwise 0.0.

    White space may stand around and between the two. Both must have content: blank thoughts would let the policy earn
    the form without its use. There is no partial credit, which would pay for the tags alone. Chat templates that open
    `<think>` in the prompt leave it out of the completion, which then never has this form.
    """
    del problem
    if any(completion.count(tag) != 1 for tag in (THINK, THINK_END, ANSWER, ANSWER_END)):
        return 0.0
    before, _, rest = completion.partition(THINK)
    thought, closed, rest = rest.partition(THINK_END)
    between, opened, rest = rest.partition(ANSWER)
    answer, ended, after = rest.partition(ANSWER_END)
    in_order = bool(closed and opened and ended)
    outside = before.strip() or between.strip() or after.strip()
    return float(in_order and not outside and bool(thought.strip()) and bool(answer.strip()))
