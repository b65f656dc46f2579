"""Checks whether the rewards contain a signal: problems that end most first runs without an error.

A group whose rewards are all equal has no advantages. If every group is such a group, nothing is learned, although
every actor works. The checks look at the groups since the last report and name the cause and the remedy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import structlog
from msgspec import Struct

from protocols.errors import visible
from protocols.finding import Finding
from protocols.rollout import ZERO_VARIANCE_THRESHOLD, bounded
from protocols.sampling import Completion
from protocols.step import GroupsEnded, StepReport

log = structlog.get_logger(actor="monitor")

FEWEST_GROUPS = 4
"""Fewer scored groups are not assessed."""

WINDOW = 32
"""Number of the latest scored groups that the checks see."""

FEWEST_COMPLETIONS = 64
"""A reward function that returned the same value for fewer completions is not assessed."""

MOSTLY = 0.9
"""Share of truncated completions that counts as nearly all."""

MAX_SHOWN = 300
"""Characters of a completion or an error that a finding shows."""


class Observed(Struct, frozen=True, kw_only=True):
    """The part of a scored group that the checks read. prompt: text of the problem."""

    prompt: str
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    parts: dict[str, tuple[float | None, ...]]


class TrainingSignal:
    """Observes the groups of a run, and logs every finding once, until the finding no longer applies.

    active: the findings that apply now, by name.
    """

    def __init__(self, expected: Mapping[str, str]) -> None:
        """expected: what each reward function expects of a completion, by name, as far as that is known."""
        self._expected = expected
        self._groups: deque[Observed] = deque(maxlen=WINDOW)
        self._failed = 0
        self._error = ""
        self.active: dict[str, Finding] = {}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings that apply now."""
        return tuple(self.active.values())

    def observe(self, report: StepReport | GroupsEnded) -> None:
        """Take the groups of a report into account, and log new findings."""
        for group in report.trained if isinstance(report, StepReport) else ():
            scored = group.scored
            self._add(scored.group.prompt.problem.prompt, scored.group.completions, scored.rewards, scored.parts)
        for discarded in report.discarded:
            if discarded.reason == "reward_error":
                self._failed, self._error = self._failed + 1, self._error or discarded.detail
            elif discarded.reason != "stale":
                problem = discarded.prompt.problem.prompt
                self._add(problem, discarded.completions, discarded.rewards, discarded.parts)
        found = {finding.name: finding for finding in self._check()}
        for name in found.keys() - self.active.keys():
            finding = found[name]
            example = {"example": finding.example} if finding.example else {}
            log.warning(
                "training_signal",
                finding=name,
                fact=finding.fact,
                consequence=finding.consequence,
                advice=finding.advice,
                **example,
            )
        for gone in self.active.keys() - found.keys():
            log.info("training_signal_recovered", finding=gone)
        self.active = found

    def _add(
        self,
        prompt: str,
        completions: tuple[Completion, ...],
        rewards: tuple[float, ...],
        parts: dict[str, tuple[float | None, ...]],
    ) -> None:
        if completions and len(rewards) == len(completions) and bounded(rewards):
            self._groups.append(Observed(prompt=prompt, completions=completions, rewards=rewards, parts=parts))
            self._failed, self._error = 0, ""

    def _check(self) -> Iterator[Finding]:
        if self._failed >= FEWEST_GROUPS:
            yield Finding(
                name="rewards_fail",
                severity="error",
                fact=f"a reward failed for each of the last {self._failed} groups",
                consequence="groups without rewards are discarded, so nothing is learned",
                advice="correct the reward function; the log has the traceback",
                example=visible(self._error, MAX_SHOWN),
            )
        if len(self._groups) < FEWEST_GROUPS:
            return
        rewards = [reward for group in self._groups for reward in group.rewards]
        if max(rewards) - min(rewards) <= ZERO_VARIANCE_THRESHOLD:
            yield self._constant(rewards)
            return
        yield from self._constant_parts()
        yield from self._truncated(min(rewards))

    def _constant(self, rewards: list[float]) -> Finding:
        parts = {name: values[0] for name, values in self._part_values().items() if values}
        described = f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})" if parts else ""
        fact = f"all {len(rewards)} completions of the last {len(self._groups)} groups have the reward {rewards[0]:g}"
        if any(value > 0 for value in parts.values()) and min(parts.values()) > 0:
            return Finding(
                name="always_rewarded",
                severity="error",
                fact=f"{fact}{described}",
                consequence="nothing can be learned from problems that are always solved",
                advice="choose harder problems",
            )
        expected = "; ".join(f"{name} expects {self._expected[name]}" for name in parts if name in self._expected)
        advice = (
            "compare the example with what the rewards expect, state the format in data.system, or choose other rewards"
        )
        group = self._groups[-1]
        return Finding(
            name="no_reward",
            severity="error",
            fact=f"{fact}{described}" + (f"; {expected}" if expected else ""),
            consequence="equal rewards have no advantages, so nothing is learned",
            advice=advice,
            example=visible(f"{group.prompt} -> {group.completions[0].text}", MAX_SHOWN, keep_end=100),
        )

    def _constant_parts(self) -> Iterator[Finding]:
        for name, values in self._part_values().items():
            if len(values) < FEWEST_COMPLETIONS or max(values) - min(values) > ZERO_VARIANCE_THRESHOLD or values[0] > 0:
                continue
            expected = f"; it expects {self._expected[name]}" if name in self._expected else ""
            yield Finding(
                name="constant_reward_part",
                severity="warning",
                fact=f"the reward {name} is {values[0]:g} for each of the last {len(values)} completions{expected}",
                consequence="a reward that never varies teaches nothing",
                advice=f"correct the reward {name}, or remove it from the profile",
            )
            return

    def _truncated(self, lowest: float) -> Iterator[Finding]:
        completions = [(c, r) for group in self._groups for c, r in zip(group.completions, group.rewards, strict=True)]
        truncated = [reward for completion, reward in completions if completion.finish_reason == "length"]
        unrewarded = max(truncated, default=lowest) - lowest <= ZERO_VARIANCE_THRESHOLD
        if len(truncated) >= MOSTLY * len(completions) and unrewarded:
            yield Finding(
                name="truncated_without_reward",
                severity="warning",
                fact=f"{len(truncated)} of {len(completions)} completions reached the token limit, and none of these "
                "earned a reward",
                consequence="most of the sampled tokens are wasted, and the policy learns only from short completions",
                advice="raise sampling.max_tokens, or check that the end token of the model is sampled",
            )

    def _part_values(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for group in self._groups:
            for name, values in group.parts.items():
                found.setdefault(name, []).extend(value for value in values if value is not None)
        return {name: values for name, values in found.items() if values}
