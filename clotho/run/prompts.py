"""The prompts of a run: which problem each group gets, and which problems are held out for evaluation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from clotho.config.schema import DataSection, Profile
from clotho.models.tokenizer import ChatTokenizer
from clotho.storage.datasets import Columns, HeldOutSplit, ProblemOrder, load_problems, split_heldout
from protocols.errors import ModelError, ProfileError, RequestError
from protocols.evaluation import HeldOut
from protocols.prompt import Problem, Prompt, group_seed

MAX_LISTED_TYPES = 10
"""Number of problem types that an error message lists."""


class PromptBuilder:
    """Builds the prompt of each group: a pure function of (dataset, seed, group_id)."""

    def __init__(
        self, problems: Sequence[Problem], prompts: Sequence[tuple[int, ...]], *, seed: int, shuffle: bool
    ) -> None:
        """prompts: the rendered prompt of each problem, in the same order."""
        self._problems, self._prompts, self._seed = problems, prompts, seed
        self._order = ProblemOrder(len(problems), seed=seed, shuffle=shuffle)

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(map(len, self._prompts))

    def prompt(self, group_id: int) -> Prompt:
        """The prompt of a group."""
        index = self._order.index(group_id)
        return Prompt(
            group_id=group_id,
            problem=self._problems[index],
            tokens=self._prompts[index],
            seed=group_seed(self._seed, group_id),
        )


def load_prompts(
    profile: Profile, tokenizer: ChatTokenizer, is_correct: Callable[[Problem, str], Awaitable[bool | None]]
) -> tuple[PromptBuilder, HeldOut]:
    """Read, split and render the problems of a profile.

    Raises DatasetError; ModelError if the chat template cannot render a problem; ProfileError for a reward that applies
    to no problem.
    """
    split = _split(profile.data, profile.seed)
    _require_applicable_rewards(profile, {problem.type for problem in (*split.train, *split.heldout)})
    train, held_out = (_render(problems, profile.data.system, tokenizer) for problems in (split.train, split.heldout))
    return (
        PromptBuilder(split.train, train, seed=profile.seed, shuffle=profile.data.shuffle),
        HeldOut(problems=split.heldout, prompts=held_out, is_correct=is_correct),
    )


def _require_applicable_rewards(profile: Profile, types: set[str]) -> None:
    for reward in profile.rewards:
        if reward.types and types.isdisjoint(reward.types):
            raise ProfileError(
                f"rewards: {reward.name} is for problems of type {', '.join(reward.types)}, and {profile.data.train} "
                f"has none; there are: {', '.join(sorted(types)[:MAX_LISTED_TYPES])}"
            )


def _split(data: DataSection, seed: int) -> HeldOutSplit:
    columns = Columns(
        prompt=data.prompt_key, answer=data.answer_key, type=data.type_key, default_type=data.default_type
    )
    problems = load_problems(data.train, columns=columns)
    if not data.heldout:
        return split_heldout(problems, data.heldout_fraction, seed)
    return HeldOutSplit(train=tuple(problems), heldout=tuple(load_problems(data.heldout, columns=columns)))


def _render(problems: Sequence[Problem], system: str, tokenizer: ChatTokenizer) -> list[tuple[int, ...]]:
    opening = [{"role": "system", "content": system}] if system else []
    try:
        return [tokenizer.render_chat([*opening, {"role": "user", "content": problem.prompt}]) for problem in problems]
    except RequestError as error:
        raise ModelError(f"the model's chat template cannot render the problems: {error}") from error
