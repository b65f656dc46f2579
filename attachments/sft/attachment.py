"""Supervised fine-tuning in a run: `learner.objective = "sft"` learns the demonstrations of `data.train`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attachments.sft.sections import SFT
from clotho.settings.objectives import Sft
from training_run.profile.rules import Rule

if TYPE_CHECKING:
    from clotho.models.tokenizer import ChatTokenizer
    from protocols.finding import Finding
    from protocols.prompt import Problem
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan

CHOICE = 'learner.objective = "sft"'


NO_EFFECT = (
    Rule(
        "sft.train_on sft.max_tokens",
        lambda v, _: v["learner.objective.type"] != "sft",
        f"only {CHOICE} learns demonstrations",
        "learner.objective.type",
    ),
    Rule(
        "sampling.group_size learner.objective.advantage.type learner.objective.overlong_penalty.type "
        "learner.objective.outlier_low learner.objective.outlier_high learner.objective.off_policy_mask "
        "learner.objective.dynamic_sampling_max_ratio",
        lambda v, _: v["learner.objective.type"] == "sft",
        f"{CHOICE} samples no completions to learn from",
        "learner.objective.type",
    ),
)
CONTRADICTIONS = (
    Rule(
        "sampling.temperature",
        lambda v, x: x != 1 and v["learner.objective.type"] == "sft",
        f"= {{}} and {CHOICE} exclude each other: demonstrations are learned at temperature 1",
        "learner.objective.type",
    ),
)
METRICS: Mapping[str, str] = {
    "sft/epochs": "Number of passes over the demonstrations so far; null without demonstrations.",
    "sft/cut": "Share of the demonstrations of the step that do not end with an end token, because they are longer "
    "than `sft.max_tokens` or their template writes none.",
}


def slots(profile: Profile) -> Mapping[str, str]:
    """Demonstrations are what episodes are otherwise, and every problem is demonstrated equally often."""
    return dict.fromkeys(("episodes", "chooser"), CHOICE) if isinstance(profile.learner.objective, Sft) else {}


def memory(need: MemoryNeed) -> None:
    """Demonstrations are sequences of which any part may be learned."""
    if need.profile is not None and isinstance(need.profile.learner.objective, Sft):
        need.sequence_tokens = SFT.of(need.profile).max_tokens


def findings_when_loaded(profile: Profile, tokenizer: ChatTokenizer, problems: Sequence[Problem]) -> Iterable[Finding]:
    """Find nothing. Raises ProfileError if the problems have no answers, or the template cannot write them."""
    if isinstance(profile.learner.objective, Sft):
        from attachments.sft.demonstrations import Demonstrator

        Demonstrator(SFT.of(profile), profile.data, tokenizer).require(problems)
    return ()


async def prepare(plan: Plan) -> Attach | None:
    """Let demonstrations come in the place of completions."""
    profile = plan.profile
    if not isinstance(profile.learner.objective, Sft):
        return None

    async def attach(run: RunContext) -> None:
        """Read the demonstrations with the tokenizer of the policy."""
        from attachments.sft.demonstrations import Demonstrator
        from training_run.groups.demonstrations import DatasetCounts, DatasetGroups

        tokenizer = run.policy.tokenizer
        run.attached.episodes = DatasetGroups(
            Demonstrator(SFT.of(profile), profile.data, tokenizer).demonstrations,
            tokenizer,
            system=profile.data.system,
            version=lambda: run.weights.value.version,
        )
        run.attached.hooks.append(DatasetCounts("sft", len(run.prompts.problems)))

    return attach


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Yield the perplexity of the demonstrations, and how often they have been seen."""
    epochs, perplexity = line.get("sft/epochs"), line.get("perplexity")
    if epochs is not None and perplexity is not None:
        yield f"perplexity {perplexity:.3g} (epoch {epochs:.2f})"
