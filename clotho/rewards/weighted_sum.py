"""A weighted sum of reward functions that are called here and now, one completion at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clotho.rewards.registry import REWARDS, RewardOptions, built_in, group_parameters, load_reward
from clotho.rewards.values import Completions, Reward, RewardError, call_all
from protocols.errors import ProfileError, did_you_mean
from protocols.prompt import AnswerIn, Problem

Function = Callable[[Problem, str], float | None]


class Rewards:
    """A weighted sum of reward functions: built-in ones by name, and your own.

    `Rewards(format=0.2, math_eval=1.0)`, or `Rewards({mine: 1.0}, format=0.2)` with `mine(problem, text) -> float`,
    which returns None where it does not apply. docs/rewards.md defines the built-in functions.
    """

    def __init__(
        self, own: Mapping[Function, float] | None = None, *, answer_in: AnswerIn = "tags", **weights: float
    ) -> None:
        """own: functions with their weights. answer_in: where built-in functions find the answer of a completion.

        weights: of built-in functions. Raises ProfileError for an unknown name, a missing library, and a function of
        whole groups, as TRL has them: in a loop of your own, call it with your lists.
        """
        table = built_in()
        names = ", ".join(table)
        if not own and not weights:
            raise ProfileError(f"Rewards needs a function: a built-in one of {names}, or your own")
        self._terms: list[tuple[Reward, float]] = []
        for function, weight in (own or {}).items():
            self._add(getattr(function, "__name__", type(function).__name__), function, weight)
        for name, weight in weights.items():
            if name not in table:
                reason = (
                    REWARDS.absence(name) or f"is no built-in function{did_you_mean(name, table)}; there are {names}"
                )
                raise ProfileError(f"Rewards: {name!r} {reason}")
            self._add(name, load_reward(name, RewardOptions(answer_in=answer_in)), weight)
        judging = {name for name in weights if table[name].reads_answer}
        self._judges = judging or {reward.name for reward, _ in self._terms if reward.name not in table}

    def _add(self, name: str, function: Function, weight: float) -> None:
        if group_parameters(function) is not None:
            raise ProfileError(f"Rewards: {name} scores a list of completions; Rewards calls (problem, text)")
        self._terms.append((Reward(name=name, function=function), weight))

    def values(self, problem: Problem, text: str) -> dict[str, float]:
        """Return the value of each function that applies, without its weight, by name. Raises RewardError."""
        seen = Completions(problem=problem, texts=(text,))
        found = {reward.name: call_all(reward, seen)[0] for reward, _ in self._terms}
        return {name: value for name, value in found.items() if value is not None}

    def __call__(self, problem: Problem, text: str) -> float:
        """Return the weighted sum of the functions that apply. Raises RewardError if none does, or one fails."""
        found = self.values(problem, text)
        if not found:
            names = ", ".join(reward.name for reward, _ in self._terms)
            raise RewardError(f"none of {names} applies to a problem with the answer {problem.answer[:60]!r}")
        return sum(weight * found[reward.name] for reward, weight in self._terms if reward.name in found)

    def correct(self, problem: Problem, text: str) -> bool:
        """Return whether every function that judges the answer, and applies, returns 1; False if none applies.

        The built-in functions that read the answer judge it; without any of them, your own functions do.
        """
        values = [value for name, value in self.values(problem, text).items() if name in self._judges]
        return bool(values) and all(value == 1.0 for value in values)
