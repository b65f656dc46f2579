"""The problems of a run: their number, whether a reward applies to them, and whether a correct answer earns it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from clotho.rewards.answer import with_answer
from clotho.rewards.registry import BuiltIn, RewardFunction, built_in
from protocols.errors import RecordsError, visible
from protocols.finding import Finding
from protocols.prompt import Problem
from training_run.profile.data import RewardSection

SAMPLED = 256
"""Number of problems, spread over the dataset, whose answers are checked."""

FEW = 8
"""A dataset with fewer different prompts is a finding if a batch has more."""

NOTABLE = 0.1
"""Share of problems with a fault that is a finding."""

MAX_NAMED = 5
"""Number of types of problems that a finding names."""


def problem_findings(
    problems: Sequence[Problem], rewards: Sequence[RewardSection], *, batch_size: int
) -> Iterator[Finding]:
    """Yield the findings about the problems for training."""
    yield from _few(problems, batch_size)
    yield from _without_reward(problems, rewards)
    yield from _unanswerable(problems, rewards)


def _few(problems: Sequence[Problem], batch_size: int) -> Iterator[Finding]:
    different = len({problem.prompt for problem in problems})
    if different == 1 or different < min(batch_size, FEW):
        several = "1 different problem" if different == 1 else f"{different} different problems"
        yield Finding(
            name="few_problems",
            fact=f"the dataset has {several} for training, and a batch has {batch_size} groups",
            consequence="the policy learns these answers by heart, and rewards soon have no variance",
            advice="name a larger dataset in data.train; 200 problems are a useful minimum",
        )


def _without_reward(problems: Sequence[Problem], rewards: Sequence[RewardSection]) -> Iterator[Finding]:
    if not rewards:  # nothing is learned from them
        return
    listed = [reward for reward in rewards if reward.weight]
    types = {problem.type for problem in problems}
    missing = sorted(kind for kind in types if not any(_applies(reward, kind) for reward in listed))
    if not missing:
        return
    count = sum(problem.type in missing for problem in problems)
    named = ", ".join(visible(kind, 40) for kind in missing[:MAX_NAMED])
    yield Finding(
        name="no_reward_applies",
        severity="error" if count == len(problems) else "warning",
        fact=f"no reward is listed for {count} of {len(problems)} problems, which have the types {named}",
        consequence="groups of these problems are discarded",
        advice="add the types to the key types of a reward in [[rewards]], or remove these problems from data.train",
    )


def _applies(reward: RewardSection, kind: str) -> bool:
    return not reward.types or kind in reward.types


def _unanswerable(problems: Sequence[Problem], rewards: Sequence[RewardSection]) -> Iterator[Finding]:
    chosen, known = problems[:: max(1, len(problems) // SAMPLED)], built_in()
    checked = [(problem, found) for problem in chosen if (found := _answer_rewards(problem, rewards, known))]
    failed = [(problem, found) for problem, found in checked if not _earns(problem, found, known)]
    if not failed or len(failed) < NOTABLE * len(checked):
        return
    problem, found = failed[0]
    yield Finding(
        name="answers_without_reward",
        severity="error" if len(failed) == len(checked) else "warning",
        fact=f"the answers of {len(failed)} of {len(checked)} checked problems earn nothing from the rewards "
        f"{', '.join(reward.name for reward in found)}",
        consequence="the correct answer of such a problem is never rewarded",
        advice="extract the answer with data.answer_pattern, name another column in data.answer_key, or list a reward "
        "that suits these answers",
        example=visible(f"{problem.prompt} -> {problem.answer}", 300, keep_end=100),
    )


def _answer_rewards(
    problem: Problem, rewards: Sequence[RewardSection], known: Mapping[str, BuiltIn]
) -> tuple[RewardSection, ...]:
    """Return the rewards of a problem that read its answer; empty if a reward in processes may read it too."""
    applicable = [reward for reward in rewards if _applies(reward, problem.type)]
    if any(_function(reward, known) is None for reward in applicable):
        return ()
    return tuple(reward for reward in applicable if known[reward.name].reads_answer)


def _function(reward: RewardSection, known: Mapping[str, BuiltIn]) -> RewardFunction | None:
    """Return a function that is cheap enough for these checks."""
    found = known.get(reward.name)
    return found.function if found else None


def _earns(problem: Problem, rewards: Sequence[RewardSection], known: Mapping[str, BuiltIn]) -> bool:
    """Whether one of these rewards has a value above 0 for a completion with the correct answer."""
    for reward in rewards:
        function, answer_in = _function(reward, known), reward.answer_in or "tags"
        value = function(problem, with_answer(problem.answer, answer_in), answer_in=answer_in) if function else None
        if value:
            return True
    return False


def unparsable_finding(error: RecordsError) -> Finding:
    """Return the finding about malformed records."""
    return Finding(
        name="dataset_unparsable",
        severity="error",
        fact=f"{error.invalid} of {error.records} records of the dataset are malformed",
        consequence="the run is refused, because it would train on another dataset than the one that is named",
        advice="correct or remove these records in data.train, or set data.prompt_key and data.answer_key",
        example=error.first,
    )
