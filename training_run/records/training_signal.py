"""Checks whether the rewards contain a signal: problems that end most first runs without an error.

A group whose rewards are all equal has no advantages. If every group is such a group, nothing is learned, although
every actor works. The checks look at the latest groups, and name the cause and the remedy.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec import Struct

from protocols.errors import visible
from protocols.finding import Change, Finding, FindingName, Remedy
from protocols.rollout import GroupOutcome, ScoredGroup, are_equal, bounded
from protocols.step import GroupsEnded, StepReport
from training_run.records.solved import Solved, count_solved, has_rewards, solved_by
from training_run.rewards.overlong import OVERLONG

FEWEST_GROUPS = 4
"""Fewer scored groups are not assessed."""

WINDOW = 32
"""Number of the latest scored groups that the checks see."""

FEWEST_COMPLETIONS = 64
"""A reward function that returned the same value for fewer completions is not assessed."""

MOSTLY, OFTEN = 0.9, 0.5
"""Shares of truncated completions that count as nearly all, and as too many."""

FEWEST_BATCHES, FEWEST_BATCH_GROUPS = 3, 24
"""Batches in a row without a signal, and groups in these batches, after which the batches are a finding."""

STILL = 0.75
"""Share of problems that are too easy or too hard below which the finding ends: it would begin with every few steps."""

LONGER = (
    "raise sampling.max_tokens, ask for shorter answers in data.system, or check that the model samples its end token"
)
"""Advice about truncated completions."""

LONGER_LIMIT = Change(key="sampling.max_tokens", factor=2.0)

HARDER, EASIER = "choose harder problems", "choose easier problems"

CURRICULUM = 'set data.curriculum = "success_rate", which prefers problems that are solved sometimes'

DIFFICULTIES: tuple[tuple[Solved, FindingName, str, str], ...] = (
    ("all", "too_easy", "by all completions", f"{HARDER}, {CURRICULUM}, or end the run"),
    ("none", "too_hard", "by no completion", f"{EASIER}, {CURRICULUM}, or raise sampling.group_size"),
)
"""Groups that make problems too easy or too hard, the finding, its fact and its advice."""

MAX_SHOWN = 300
"""Characters of a completion or an error that a finding shows."""


class _Silence(Struct):
    """Batches in a row that had no group to train on because of equal rewards.

    groups: number of their groups by which completions solved the problem. seconds: duration of the batches.
    """

    batches: int = 0
    groups: Counter[Solved] = msgspec.field(default_factory=Counter)
    seconds: float = 0.0


class TrainingSignal:
    """Observes the groups of a run, and finds rewards without a signal.

    expected: what each reward function expects of a completion, by name, as far as that is known.
    window: number of the latest scored groups that the checks see.
    """

    def __init__(self, expected: Mapping[str, str], *, window: int = WINDOW) -> None:
        self._expected = expected
        self._groups: deque[GroupOutcome] = deque(maxlen=window)
        self._failed = 0
        self._error = ""
        self._silence = _Silence()
        self._difficult: set[FindingName] = set()

    def observe(self, report: StepReport | GroupsEnded) -> None:
        """Take the groups of a report into account."""
        self.observe_groups(report.ended)
        self._count(report)

    def observe_groups(self, groups: Iterable[GroupOutcome]) -> None:
        """Take groups into account, as the checks of rewards and truncation need them."""
        for group in groups:
            if isinstance(group, ScoredGroup):
                if not (group.token_advantages or group.teacher_logprobs or group.teacher):  # else learned in any case
                    self._add(group)
            elif group.reason == "reward_error":
                self._failed, self._error = self._failed + 1, self._error or group.detail
            elif group.reason != "stale":
                self._add(group)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings that apply now."""
        if self._failed >= FEWEST_GROUPS:
            yield Finding(
                name="rewards_fail",
                severity="error",
                fact=f"a reward or environment failed for each of the last {self._failed} groups",
                consequence="groups without rewards are discarded, so nothing is learned",
                advice="correct it; the event reward_failed or episode_failed in log.jsonl has the reason",
                example=visible(self._error, MAX_SHOWN),
            )
        if len(self._groups) < FEWEST_GROUPS:
            return
        rewards = [reward for group in self._groups for reward in group.rewards]
        if are_equal(rewards):
            yield self._constant(rewards)
            return
        yield from self._silent() or self._difficulty()
        yield from self._constant_parts()
        yield from self._truncated()

    def _add(self, group: GroupOutcome) -> None:
        if has_rewards(group) and len(group.rewards) == len(group.completions) and bounded(group.rewards):
            self._groups.append(group)
            self._failed, self._error = 0, ""

    def _count(self, report: StepReport | GroupsEnded) -> None:
        """Continue or end the series of batches without a signal."""
        if isinstance(report, StepReport) and report.trained:
            self._silence = _Silence()
            return
        self._silence.groups += count_solved(group for group in report.discarded if group.reason == "zero_variance")
        if isinstance(report, StepReport) and self._silence.groups:
            self._silence.batches += 1
            self._silence.seconds += report.wait_seconds + report.train_seconds

    def _silent(self) -> list[Finding]:
        found = self._silence
        solved, failed = found.groups["all"], found.groups["none"]
        if found.batches < FEWEST_BATCHES or found.groups.total() < FEWEST_BATCH_GROUPS:
            return []
        advice = f"{HARDER} and {EASIER}" if solved and failed else HARDER if solved else EASIER
        finding = Finding(
            name="no_signal",
            severity="error",
            fact=f"none of the last {found.batches} batches had a group with different rewards: in {solved} groups "
            f"all completions were correct, in {failed} all were wrong",
            consequence=f"these batches took {found.seconds:.0f} s and did not change the policy",
            advice=f"{advice}, raise sampling.group_size or sampling.temperature, or use learner.objective dapo, which "
            "replaces such groups",
            remedy=Remedy(action="fork", changes=(Change(key="sampling.group_size", factor=2.0),)),
        )
        return [finding]

    def _difficulty(self) -> Iterator[Finding]:
        """Yield a finding if most of the latest problems are solved by all completions of their groups, or by none."""
        counts = Counter(solved_by(group) for group in self._groups if are_equal(group.rewards))
        total = len(self._groups)
        for solved, name, fact, advice in DIFFICULTIES:
            share = STILL if name in self._difficult else MOSTLY
            self._difficult.discard(name)
            if total >= FEWEST_BATCH_GROUPS and counts[solved] >= share * total:
                self._difficult.add(name)
                yield Finding(
                    name=name,
                    fact=f"{counts[solved]} of the last {total} problems are solved {fact} of their groups",
                    consequence="groups with equal rewards have no gradient, so most of the sampling is wasted",
                    advice=advice,
                    remedy=Remedy(action="fork", changes=(Change(key="data.curriculum", value="success_rate"),)),
                )

    def _constant(self, rewards: list[float]) -> Finding:
        parts = {name: values[0] for name, values in self._part_values().items() if values}
        described = f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})" if parts else ""
        fact = f"all {len(rewards)} completions of the last {len(self._groups)} groups have the reward {rewards[0]:g}"
        cost = f", at a cost of {self._silence.seconds:.0f} s so far" if self._silence.seconds >= 1.0 else ""
        least = min((value for name, value in parts.items() if name != OVERLONG), default=0.0)
        if least > 0 and all(solved_by(group) != "none" for group in self._groups):
            return Finding(
                name="always_rewarded",
                severity="error",
                fact=f"{fact}{described}",
                consequence=f"nothing can be learned from problems that are always solved{cost}",
                advice=HARDER,
            )
        expected = "; ".join(f"{name} expects {self._expected[name]}" for name in parts if name in self._expected)
        fact = f"{fact}{described}" + (f"; {expected}" if expected else "")
        reasons = [completion.finish_reason for group in self._groups for completion in group.completions]
        truncated, total = reasons.count("length"), len(reasons)
        if truncated >= MOSTLY * total:
            return Finding(
                name="all_truncated",
                severity="error",
                fact=f"{truncated} of {total} completions reached the token limit, and {fact}",
                consequence=f"a completion without an end earns no reward, so nothing is learned{cost}",
                advice=LONGER,
                remedy=Remedy(action="start", changes=(LONGER_LIMIT,)),
                example=self._example(),
            )
        return Finding(
            name="no_reward",
            severity="error",
            fact=fact,
            consequence=f"equal rewards have no advantages, so nothing is learned{cost}",
            advice="compare the example with what the rewards expect, state the format in data.system, or choose "
            "other rewards",
            example=self._example(),
        )

    def _constant_parts(self) -> Iterator[Finding]:
        for name, values in self._part_values().items():
            if len(values) < FEWEST_COMPLETIONS or not are_equal(values) or values[0] > 0:
                continue
            expected = f"; it expects {self._expected[name]}" if name in self._expected else ""
            yield Finding(
                name="constant_reward_part",
                fact=f"the reward {name} is {values[0]:g} for each of the last {len(values)} completions{expected}",
                consequence="a reward that never varies has no gradient",
                advice=f"correct the reward {name}, or remove it from the profile",
            )
            return

    def _truncated(self) -> Iterator[Finding]:
        """Yield a finding if too many completions are truncated and completions that end earn more."""
        completions = [(c, r) for group in self._groups for c, r in zip(group.completions, group.rewards, strict=True)]
        truncated = [reward for completion, reward in completions if completion.finish_reason == "length"]
        ended = [reward for completion, reward in completions if completion.finish_reason != "length"]
        if not ended:
            yield Finding(
                name="all_truncated",
                fact=f"all {len(truncated)} completions reached the token limit",
                consequence="no completion has an end, so the policy does not learn to finish its answer",
                advice=LONGER,
                remedy=Remedy(action="start", changes=(LONGER_LIMIT,)),
                example=self._example(),
            )
            return
        if len(truncated) < OFTEN * len(completions):
            return
        if sum(truncated) / len(truncated) < sum(ended) / len(ended):
            yield Finding(
                name="truncated",
                fact=f"{len(truncated)} of {len(completions)} completions reached the token limit, and earn less than "
                "the others",
                consequence="most of the sampled tokens are wasted, and the policy learns only from short completions",
                advice=LONGER,
                remedy=Remedy(action="fork", changes=(LONGER_LIMIT,)),
            )

    def _example(self) -> str:
        group = self._groups[-1]
        return visible(f"{group.prompt.problem.prompt} -> {group.completions[0].text}", MAX_SHOWN, keep_end=100)

    def _part_values(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for group in self._groups:
            for name, values in group.parts.items():
                found.setdefault(name, []).extend(value for value in values if value is not None)
        return {name: values for name, values in found.items() if values}
