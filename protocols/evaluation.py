"""Held-out problems, the grades of their completions, and the evaluation report from the evaluator to the monitor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct

from protocols.prompt import Problem
from protocols.sampling import Completion


class Grade(Struct, frozen=True, kw_only=True):
    """What the reward functions say about one completion of a held-out problem.

    correct: None if no reward with `correct = true` applies to the problem. reward: the weighted sum of all functions
    that apply, with the length penalty, as in training; None if no function applies or one of them failed. parts: value
    of each function that applies. failed: names of the functions that failed.
    """

    correct: bool | None
    reward: float | None = None
    parts: Mapping[str, float] = {}
    failed: tuple[str, ...] = ()


GradeCompletions = Callable[[Problem, Sequence[Completion]], Awaitable[Sequence[Grade]]]
"""Grades completions of one problem. A reward over a whole group sees these completions as the group."""


class ReferenceLoss(Struct, frozen=True, kw_only=True):
    """Negative log-likelihood of one reference completion in nats, summed over its tokens, and their number."""

    nats: float
    tokens: int


class HeldOut(Struct, frozen=True, kw_only=True):
    """Held-out problems with their rendered prompts and reference completions, index by index.

    references: tokens of the reference completion after the prompt; empty if the dataset has none for the problem.
    """

    problems: Sequence[Problem]
    prompts: Sequence[tuple[int, ...]]
    references: Sequence[tuple[int, ...]]
    grade: GradeCompletions


class Estimate(Struct, frozen=True, kw_only=True):
    """A mean over held-out problems with its confidence interval of 95 %. problems: number of problems with a value."""

    value: float
    low: float
    high: float
    problems: int


class SampledResults(Struct, frozen=True, kw_only=True):
    """Results of the completions that are sampled at the temperature of training.

    samples: completions per problem. avg: avg@k, the share of correct completions. pass_at: by k, the probability that
    at least one of k completions is correct (pass@k). reward: mean reward. Estimates are None, and keys of `pass_at`
    missing, if no problem has a value.
    """

    samples: int
    avg: Estimate | None = None
    pass_at: Mapping[str, Estimate] = {}
    reward: Estimate | None = None


class HeldOutMeasures(Struct, frozen=True, kw_only=True):
    """What an evaluation measures beside the accuracy; a value that does not exist is None, or missing in a table.

    reward: mean reward of the greedy completions. rewards: mean value of each reward function, without its weight.
    loss: held-out loss, the mean negative log-likelihood in nats per token of the reference completions.
    completion_length: mean number of tokens of the greedy completions. truncated: share of the greedy completions that
    reached the token limit. sampled: None if no completions are sampled.
    """

    reward: Estimate | None = None
    rewards: Mapping[str, Estimate] = {}
    loss: Estimate | None = None
    completion_length: float | None = None
    truncated: float | None = None
    sampled: SampledResults | None = None


class EvalReport(Struct, frozen=True, kw_only=True, tag=True):
    """Evaluator -> monitor. Greedy accuracy and further measures of one policy version on held-out problems.

    problems: number of problems that a reward with `correct = true` applies to. ungraded: number of problems that no
    such reward applies to; they do not count towards the accuracy. failed: number of problems with a reward function
    that failed; such a completion has no reward, and is incorrect if the function has `correct = true`. accuracy: share
    of correct answers among `problems`; None if there are none. interval: interval of 95 % of the accuracy. by_type:
    accuracy for each type of problem. completion_tokens: of all completions. final: evaluated after the last update.
    """

    step: int
    version: int
    problems: int
    ungraded: int = 0
    failed: int = 0
    accuracy: float | None
    interval: tuple[float, float] | None
    by_type: dict[str, float]
    measures: HeldOutMeasures = HeldOutMeasures()
    completion_tokens: int
    seconds: float
    final: bool
