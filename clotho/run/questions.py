"""The problems of a run, as prompts: which group asks which, and which are held out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from clotho.config.schema import DataSection, Profile
from clotho.models.tokenizer import ChatTokenizer
from clotho.storage.datasets import Columns, HeldOutSplit, load_problems, split_heldout
from clotho.storage.problem_order import ProblemOrder
from protocols.errors import ModelError, ProfileError, RequestError
from protocols.evaluation import HeldOut
from protocols.prompt import Problem, Prompt
from protocols.seeds import group_seed

SHOWN = 10
"""Kinds of problems that a complaint lists."""


class Questions:
    """Makes the prompt of every group: a pure function of (dataset, seed, group_id)."""

    def __init__(
        self, problems: Sequence[Problem], prompts: Sequence[tuple[int, ...]], *, seed: int, shuffle: bool
    ) -> None:
        """prompts: the rendered problems, index by index."""
        self._problems, self._prompts, self._seed = problems, prompts, seed
        self._order = ProblemOrder(len(problems), seed=seed, shuffle=shuffle)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._prompts))

    def prompt(self, group_id: int) -> Prompt:
        """The prompt that group `group_id` asks."""
        index = self._order.index(group_id)
        return Prompt(
            group_id=group_id,
            problem=self._problems[index],
            tokens=self._prompts[index],
            seed=group_seed(self._seed, group_id),
        )


def load_questions(
    profile: Profile, tokenizer: ChatTokenizer, is_correct: Callable[[Problem, str], Awaitable[bool]]
) -> tuple[Questions, HeldOut]:
    """Read, split and render a profile's problems.

    Raises DatasetError, ModelError if they cannot be rendered, ProfileError for a reward that is for none of them.
    """
    split = _split(profile.data, profile.seed)
    _refuse_idle_rewards(profile, {problem.type for problem in (*split.train, *split.heldout)})
    train, held_out = (_render(problems, profile.data.system, tokenizer) for problems in (split.train, split.heldout))
    return (
        Questions(split.train, train, seed=profile.seed, shuffle=profile.data.shuffle),
        HeldOut(problems=split.heldout, prompts=held_out, is_correct=is_correct),
    )


def _refuse_idle_rewards(profile: Profile, kinds: set[str]) -> None:
    for reward in profile.rewards:
        if reward.types and kinds.isdisjoint(reward.types):
            raise ProfileError(
                f"rewards: {reward.name} is for problems of type {', '.join(reward.types)}, and {profile.data.train} "
                f"has none; there are: {', '.join(sorted(kinds)[:SHOWN])}"
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
