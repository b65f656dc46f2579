"""The prompts of a run: which problem each group gets, and which problems are held out for evaluation."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from clotho.data.problems import ProblemColumns, conversation, load_problems
from clotho.data.records import Source
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.bounds import Off
from protocols.errors import DatasetError, ProfileError
from protocols.evaluation import GradeCompletions, HeldOut
from protocols.prompt import Problem, Prompt, group_seed
from protocols.summary import DatasetReport, PromptReport
from training_run.groups.order import HeldOutSplit, ProblemOrder, split_heldout
from training_run.groups.rendering import CHECKED, Rendered, Renderer, Say
from training_run.profile.generators import Generators, epoch_weights, prefix_of
from training_run.profile.schema import Profile

if TYPE_CHECKING:
    from training_run.profile.command_profiles import EvaluationProfile

DEFAULT_SPLIT = "train"
"""Default of `data.train_split`; a file, which has no splits, accepts no other."""

MAX_LISTED_TYPES = 10
"""Number of problem types that an error message lists."""


class PromptBuilder:
    """Builds the prompt of each group: a pure function of (dataset, seed, group_id) and the chosen problem."""

    def __init__(
        self,
        problems: Sequence[Problem],
        prompts: Sequence[tuple[int, ...]],
        *,
        seed: int,
        shuffle: bool,
        weights: Mapping[str, float],
    ) -> None:
        """prompts: the rendered prompt of each problem, in the same order. weights: of types, see `ProblemOrder`."""
        self._problems, self._prompts, self._seed = problems, prompts, seed
        self.order = ProblemOrder([p.type for p in problems], weights=weights, seed=seed, shuffle=shuffle)

    @property
    def problems(self) -> Sequence[Problem]:
        """The problems for training, without those that were removed."""
        return self._problems

    def prompt(self, group_id: int, problem: int | None = None) -> Prompt:
        """The prompt of a group. problem: index of its problem; None for that of the order of problems.

        Raises ModelError if the chat template cannot render the problem.
        """
        index = self.order.index(group_id) if problem is None else problem
        return Prompt(
            group_id=group_id,
            problem=self._problems[index],
            tokens=self._prompts[index],
            seed=group_seed(self._seed, group_id),
        )


class LoadedPrompts(Struct, frozen=True, kw_only=True, eq=False):
    """The prompts of a run, with what the dataset contains. longest: tokens of the longest prompt of those measured."""

    builder: PromptBuilder
    held_out: HeldOut
    dataset: DatasetReport
    prompts: PromptReport
    longest: int


def load_prompts(
    split: HeldOutSplit, profile: Profile, tokenizer: ChatTokenizer, grade: GradeCompletions, *, longest: int, say: Say
) -> LoadedPrompts:
    """Filter the problems that `read_split` has read, and render those that are needed at the start.

    longest: number of tokens above which a prompt is measured in any case. say: shows how far the rendering is.
    Raises DatasetError if no problem is left; ModelError if the chat template cannot render a problem.
    """
    data = profile.data
    renderer, evaluated = Renderer(data, tokenizer, say), _evaluated(profile)
    train = renderer.render_for_training(split.train, longest=longest)
    held_out = renderer.render(split.heldout, first=evaluated)
    return LoadedPrompts(
        builder=PromptBuilder(
            train.problems,
            train.prompts,
            seed=profile.seed,
            shuffle=data.shuffle,
            weights=epoch_weights(data, train.problems),
        ),
        held_out=HeldOut(
            problems=held_out.problems,
            prompts=held_out.prompts,
            references=renderer.references(held_out, first=evaluated),
            grade=grade,
        ),
        dataset=_dataset_report(split),
        prompts=_prompt_report(split, train, held_out, tokenizer),
        longest=max((*train.lengths, *held_out.lengths)),
    )


def _evaluated(profile: Profile) -> int | None:
    """Number of held-out problems that are evaluated; None for all."""
    if isinstance(profile.eval, Off):
        return 0
    return max(profile.eval.problems, profile.eval.problems_between) if profile.eval.problems else None


def inspect_dataset(
    profile: Profile, model: Path | None, *, split: HeldOutSplit | None = None, say: Say = lambda line: None
) -> tuple[DatasetReport, PromptReport | None]:
    """Describe the problems of a profile, and their prompts if the files of the model are on this machine.

    split: the problems; None reads them. say: as in `load_prompts`.

    Raises the errors of `read_split` and `load_prompts`.
    """
    split = split or read_split(profile)
    dataset = _dataset_report(split)
    ProblemOrder([p.type for p in split.train], weights=profile.data.type_weights, seed=0, shuffle=False)
    if model is None:
        return dataset, None
    tokenizer = ChatTokenizer.of_model(model, profile.model)
    renderer = Renderer(profile.data, tokenizer, say)
    train = renderer.render_for_training(split.train, longest=sys.maxsize)
    held_out = renderer.render(split.heldout, first=CHECKED)
    return dataset, _prompt_report(split, train, held_out, tokenizer)


def dataset_warnings(loaded: LoadedPrompts) -> tuple[str, ...]:
    """Sentences about removed problems, and about held-out problems in training."""
    found, dataset, prompts = [], loaded.dataset, loaded.prompts
    if prompts.removed or prompts.removed_heldout:
        found.append(
            f"{prompts.removed} problems and {prompts.removed_heldout} held-out problems were removed, because their "
            "prompts have more than data.max_prompt_tokens tokens"
        )
    if dataset.overlap:
        found.append(
            f"{dataset.overlap} of {dataset.heldout} held-out problems are also trained on, so that held-out accuracy "
            "does not show generalization: remove these prompts from one of the two datasets"
        )
    return tuple(found)


def _require_applicable_rewards(profile: Profile | EvaluationProfile, types: set[str]) -> None:
    for reward in profile.rewards:
        if reward.types and types.isdisjoint(reward.types):
            raise ProfileError(
                f"rewards: {reward.name} is for problems of type {', '.join(reward.types)}, and {profile.data.train} "
                f"has none; there are: {', '.join(sorted(types)[:MAX_LISTED_TYPES])}"
            )


def read_split(profile: Profile | EvaluationProfile) -> HeldOutSplit:
    """Read and split the problems of a profile.

    Raises DatasetError; ProfileError for a reward that applies to no problem.
    """
    data = profile.data
    columns = ProblemColumns(
        prompt=data.prompt_key,
        messages=data.messages_key,
        answer=data.answer_key if profile.rewards or data.answer_pattern else "",
        answer_pattern=data.answer_pattern,
        type=data.type_key,
        default_type=data.default_type,
    )
    if data.train_split != DEFAULT_SPLIT and Path(data.train).expanduser().is_file():
        raise DatasetError(f"data.train_split names a split, and {data.train} is a file, which has no splits")
    with Generators(data) as generators:

        def read(source: Source, part: str, excluded: Collection[Problem] = ()) -> list[Problem]:
            """Generate problems, without the prompts of `excluded`, or read those of another dataset."""
            if not prefix_of(source.path):
                return load_problems(source, columns=columns)
            if source.subset or source.split not in ("", DEFAULT_SPLIT):
                text = "has no subsets and no splits: remove data.subset and the names of splits"
                raise DatasetError(f"{source.path} {text}")
            prompts = {problem.prompt for problem in excluded}
            return generators.problems(source.path, seed=profile.seed, part=part, excluded=prompts)

        problems = read(Source(path=data.train, subset=data.subset, split=data.train_split), "train")
        if data.heldout or data.heldout_split:
            path, subset = (data.heldout, "") if data.heldout else (data.train, data.subset)
            if data.heldout_split and Path(path).expanduser().is_file():
                raise DatasetError(
                    f"data.heldout_split names a part of a directory or of a dataset on the hub, not of {path}"
                )
            held_out = read(Source(path=path, subset=subset, split=data.heldout_split), "heldout", problems)
            split = HeldOutSplit(train=tuple(problems), heldout=tuple(held_out))
        else:
            split = split_heldout(problems, data.heldout_fraction, profile.seed)
    _require_applicable_rewards(profile, {problem.type for problem in (*split.train, *split.heldout)})
    return split


def _dataset_report(split: HeldOutSplit) -> DatasetReport:
    train, held_out = (
        [msgspec.json.encode(conversation(p, "")) for p in part] for part in (split.train, split.heldout)
    )
    trained = set(train)
    return DatasetReport(
        problems=dict(Counter(problem.type for problem in split.train)),
        heldout=len(held_out),
        duplicates=len(train) - len(trained),
        overlap=sum(prompt in trained for prompt in held_out),
        fingerprint=problems_fingerprint(split.train, split.heldout),
    )


def _prompt_report(split: HeldOutSplit, train: Rendered, held_out: Rendered, tokenizer: ChatTokenizer) -> PromptReport:
    lengths = sorted(train.lengths)
    return PromptReport(
        shortest=lengths[0],
        median=median(lengths),
        longest=lengths[-1],
        measured=len(lengths),
        removed=len(split.train) - len(train.problems),
        removed_heldout=len(split.heldout) - len(held_out.problems),
        first=tokenizer.decode(train.prompts[0], skip_special_tokens=False),
    )


def problems_fingerprint(*parts: Sequence[Problem]) -> str:
    """Return a fingerprint of the contents of datasets, in the given order; their form and place do not matter.

    Reference completions are not part of the fingerprint, because nothing is trained on them.
    """
    digest = hashlib.sha256()
    for problems in parts:
        digest.update(f"{len(problems)}\n".encode())
        for problem in problems:
            fields = msgspec.structs.asdict(problem)
            del fields["completion"]
            digest.update(msgspec.json.encode(fields))
    return digest.hexdigest()[:16]
