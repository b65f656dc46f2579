"""AdaLoRA in a run: `policy.rank_budget = "adalora"`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attachments.adalora.sections import RANK_BUDGET, AdaLora
from clotho.settings.model import AdapterMethod
from protocols.errors import ProfileError
from training_run.profile.rules import Complaint, Rule
from training_run.supervision.hooks import UpdateHook

if TYPE_CHECKING:
    from clotho.training.update import PolicyLearner
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan

KEY = "policy.rank_budget"
CHOICE = f'{KEY} = "adalora"'


CONTRADICTIONS = (
    Rule(
        "policy.method.type",
        lambda v, x: x != "lora" and v[f"{KEY}.type"] != "off",
        f'= "{{}}" and {CHOICE} exclude each other: AdaLoRA chooses the ranks of a LoRA; set "lora"',
    ),
)
METRICS: Mapping[str, str] = {
    "adalora/mean_rank": "Mean number of triplets in use of a module, after the update; null without AdaLoRA.",
    "adalora/smallest_rank": "The smallest number of triplets in use of a module.",
    "adalora/largest_rank": "The largest number of triplets in use of a module.",
}


def complaints(profile: Profile) -> Iterable[Complaint]:
    """Refuse a budget that cannot fall, and a learner that has no such steps."""
    settings, method = RANK_BUDGET.of(profile.policy), profile.policy.method
    if not isinstance(settings, AdaLora) or not isinstance(method, AdapterMethod):
        return
    if settings.target_rank > method.rank and not method.ranks:
        text = f"{KEY}.target_rank = {settings.target_rank} is above policy.method.rank = {method.rank}, the rank "
        yield Complaint(f"{KEY}.target_rank", f"{text}at the start: raise one or lower the other")
    if not getattr(profile, "stages", ()) and (flaw := _too_short(settings, profile.steps)):
        yield Complaint(f"{KEY}.warmup_steps", flaw)
    if any(actor.mode == "replace" and actor.at == "learner" for actor in profile.actors):
        yield Complaint(f"{KEY}.type", f"{CHOICE} belongs to the built-in learner, which a custom actor replaces")


def memory(need: MemoryNeed) -> None:
    """Hold the coordinates of the adapter and two averages of each."""
    if need.profile is not None and isinstance(RANK_BUDGET.of(need.profile.policy), AdaLora):
        from attachments.adalora.rule import COPIES

        need.adapter_copies += COPIES


async def prepare(plan: Plan) -> Attach | None:
    """Let the learner step in P, Lambda and Q. Raises ProfileError if a stage is too short."""
    settings, stage = RANK_BUDGET.of(plan.profile.policy), plan.directory.stage
    if not isinstance(settings, AdaLora):
        return None
    from attachments.adalora.rule import AdaLoraRule

    steps = plan.profile.steps - (stage.first_step if stage is not None else 0)
    if flaw := _too_short(settings, steps):
        raise ProfileError(flaw if stage is None else f"stages[{stage.number - 1}]: {flaw}")
    plan.rule = AdaLoraRule(settings, steps=steps, seed=plan.profile.seed)

    async def attach(run: RunContext) -> None:
        """Report the ranks, and leave what is pruned out of the adapter's files."""
        from attachments.adalora.packed import packed

        run.policy.pack = packed
        run.attached.hooks.append(RankReport(run.policy_learner))

    return attach


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Yield the mean rank."""
    if (rank := line.get("adalora/mean_rank")) is not None:
        yield f"mean rank {rank:.3g}"


def _too_short(settings: AdaLora, steps: int) -> str:
    """Return why a schedule does not fit the number of updates; empty if it does."""
    if settings.warmup_steps + settings.final_steps < steps:
        return ""
    return (
        f"{KEY}.warmup_steps = {settings.warmup_steps} and {KEY}.final_steps = {settings.final_steps} leave no update "
        f"of {steps} in which the ranks fall: lower them, or train longer"
    )


class RankReport(UpdateHook):
    """Reports how many triplets are in use."""

    def __init__(self, learner: PolicyLearner) -> None:
        self._learner = learner

    def metrics(self) -> Mapping[str, Any]:
        """Return the ranks of the newest weights."""
        from attachments.adalora.rule import VALUES, ranks

        found = ranks(self._learner.snapshot().state.optimizer.slots[VALUES])
        return {
            "adalora/mean_rank": sum(found) / len(found),
            "adalora/smallest_rank": min(found),
            "adalora/largest_rank": max(found),
        }
