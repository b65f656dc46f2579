"""Preferences in a run: objectives such as `learner.objective = "dpo"` learn the pairs of `data.train`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attachments.preference.sections import PREFERENCE
from clotho.settings.objectives import Kto, PreferenceObjective
from training_run.profile.rules import PREFERENCES, Rule, Values

if TYPE_CHECKING:
    from clotho.models.tokenizer import ChatTokenizer
    from protocols.finding import Finding
    from protocols.prompt import Problem
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan

OBJECTIVE, PAIRS = "learner.objective.type", "preference.pairs"


def _reads_pairs(profile: Profile) -> bool:
    """Whether a run learns the pairs of its dataset."""
    return isinstance(profile.learner.objective, PreferenceObjective) and PREFERENCE.of(profile).pairs == "dataset"


def _of_dataset(v: Values) -> bool:
    """The same of a profile by key path."""
    return v[OBJECTIVE] in PREFERENCES and v[PAIRS] == "dataset"


NO_EFFECT = (
    Rule(
        PAIRS,
        lambda v, _: v[OBJECTIVE] not in PREFERENCES,
        "learner.objective is no objective of preferences",
        OBJECTIVE,
    ),
    Rule(
        "preference.max_tokens",
        lambda v, _: not _of_dataset(v),
        f'only objectives of preferences with {PAIRS} = "dataset" read completions',
        f"{OBJECTIVE} {PAIRS}",
    ),
    Rule(
        "sampling.group_size learner.objective.overlong_penalty.type learner.objective.dynamic_sampling_max_ratio",
        lambda v, _: _of_dataset(v),
        f'{PAIRS} = "dataset" samples no completions to learn from',
        f"{OBJECTIVE} {PAIRS}",
    ),
)
CONTRADICTIONS = (
    Rule(
        "sampling.temperature",
        lambda v, x: x != 1 and _of_dataset(v),
        f'= {{}} and {PAIRS} = "dataset" exclude each other: completions of a dataset are learned at temperature 1',
    ),
)
METRICS: Mapping[str, str] = {
    "preference/epochs": "Number of passes over the pairs of the dataset so far; null without them.",
    "preference/cut": "Share of the pairs of the step with a completion that does not end with an end token, "
    "because it is longer than `preference.max_tokens` or its template writes none.",
}


def slots(profile: Profile) -> Mapping[str, str]:
    """Pairs are what episodes are otherwise, and every problem is learned equally often."""
    return dict.fromkeys(("episodes", "chooser"), f'{PAIRS} = "dataset"') if _reads_pairs(profile) else {}


def memory(need: MemoryNeed) -> None:
    """Completions of a dataset are sequences of which any part may be learned."""
    if need.profile is not None and _reads_pairs(need.profile):
        need.sequence_tokens = PREFERENCE.of(need.profile).max_tokens


def findings_when_loaded(profile: Profile, tokenizer: ChatTokenizer, problems: Sequence[Problem]) -> Iterable[Finding]:
    """Find nothing. Raises ProfileError if the problems have no pairs, or the template cannot write them."""
    if _reads_pairs(profile):
        from attachments.preference.pairs import PairReader

        labelled = isinstance(profile.learner.objective, Kto)
        PairReader(PREFERENCE.of(profile), profile.data, tokenizer, labelled=labelled).require(problems)
    return ()


async def prepare(plan: Plan) -> Attach | None:
    """Let pairs come in the place of completions."""
    profile = plan.profile
    if not _reads_pairs(profile):
        return None

    async def attach(run: RunContext) -> None:
        """Read the pairs with the tokenizer of the policy."""
        from attachments.preference.pairs import PairReader
        from training_run.groups.demonstrations import DatasetCounts, DatasetGroups

        tokenizer, labelled = run.policy.tokenizer, isinstance(profile.learner.objective, Kto)
        run.attached.episodes = DatasetGroups(
            PairReader(PREFERENCE.of(profile), profile.data, tokenizer, labelled=labelled).judged,
            tokenizer,
            system=profile.data.system,
            version=lambda: run.weights.value.version,
        )
        run.attached.hooks.append(DatasetCounts("preference", len(run.prompts.problems)))

    return attach


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Yield the accuracy and the margin of the implicit reward, and how often the pairs have been seen."""
    accuracy, margin, epochs = (
        line.get(name) for name in ("preference_accuracy", "preference_margin", "preference/epochs")
    )
    if accuracy is not None and margin is not None:
        yield f"pairs in order {100 * accuracy:.0f} %, margin {margin:.3g}"
    if epochs is not None:
        yield f"epoch {epochs:.2f}"
