"""Held-out problems, the grades of their completions, and the evaluation report from the evaluator to the monitor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated

from msgspec import Struct, field

from protocols import about
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


class EvalReport(Struct, frozen=True, kw_only=True):
    """Evaluator -> monitor, and a line of evaluations.jsonl: measures of one policy version on held-out problems.

    A problem is graded if a reward with `correct = true` applies to it. A completion whose reward function failed has
    no reward, and is incorrect if the function has `correct = true`. A value that does not exist is None, or missing in
    a table. The monitor sets `run_seconds`.
    """

    step: Annotated[int, about("Step whose weights were evaluated; 0 is the initial policy.")]
    version: Annotated[int, about("Version of these weights.")] = field(name="policy_version")
    accuracy: Annotated[
        float | None,
        about(
            "Fraction of the graded held-out problems that greedy decoding answers correctly; null if none is graded."
        ),
    ]
    interval: Annotated[tuple[float, float] | None, about("Interval of 95 % of the accuracy (Wilson).")] = field(
        name="accuracy_interval"
    )
    by_type: Annotated[dict[str, float], about("Accuracy by type of problem.")] = field(name="accuracy_by_type")
    problems: Annotated[int, about("Number of graded problems: those that a reward with `correct = true` applies to.")]
    ungraded: Annotated[int, about("Number of problems that no reward with `correct = true` applies to.")] = 0
    failed: Annotated[int, about("Number of problems with a reward function that failed on a completion.")] = 0
    reward: Annotated[
        Estimate | None,
        about(
            "Mean reward of the greedy completions, weighted as in training: `value`, the ends `low` and `high` of its "
            "interval of 95 % (normal), and `problems`, the number of problems with a reward; null if there are none."
        ),
    ] = None
    rewards: Annotated[
        Mapping[str, Estimate], about("The same for the value of each reward function, by name and without weight.")
    ] = {}
    loss: Annotated[
        Estimate | None,
        about(
            "Held-out loss: mean negative log-likelihood of the reference completions, in nats per token, with the "
            "keys of `reward`; null if the dataset has none."
        ),
    ] = None
    completion_length: Annotated[float | None, about("Mean number of tokens of the greedy completions.")] = field(
        name="completion_length/mean", default=None
    )
    truncated: Annotated[
        float | None,
        about("Fraction of the greedy completions that reached `sampling.max_tokens` or the context length."),
    ] = field(name="truncated_fraction", default=None)
    samples: Annotated[int, about("Sampled completions per problem (k = `eval.samples`).")] = 0
    avg: Annotated[
        Estimate | None,
        about(
            "Mean share of correct completions among the k sampled completions of a problem, with the keys of "
            "`reward` (interval: Wilson's at the effective number of problems); null without samples."
        ),
    ] = field(name="avg_at_k", default=None)
    pass_at: Annotated[
        Mapping[str, Estimate],
        about(
            "By k, the probability that at least one of k sampled completions is correct (unbiased estimate), with "
            "the keys and interval of `avg_at_k`."
        ),
    ] = {}
    sampled_reward: Annotated[
        Estimate | None,
        about("Mean reward of the sampled completions, with the keys of `reward`; null without samples."),
    ] = None
    completion_tokens: Annotated[int, about("Total number of tokens of the completions, sampled ones included.")]
    seconds: Annotated[float, about("Seconds that the evaluation took.")] = field(name="time/evaluation")
    run_seconds: Annotated[float, about("Age of the run in seconds at the end of the evaluation.")] = field(
        name="time/run", default=0.0
    )
    final: Annotated[bool, about("Whether the evaluation follows the last update of the run.")]
