"""PPO with a critic in a run: `critic = "value_head"`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attachments.critic.sections import CRITIC, ValueHead
from protocols.errors import CheckpointError
from training_run.profile.rules import Complaint, Rule, slot_settings

if TYPE_CHECKING:
    from attachments.critic.critic import CriticUpdates
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan

CHOICE = 'critic = "value_head"'


NO_EFFECT = (
    Rule(
        "learner.objective.dynamic_sampling_max_ratio",
        lambda v, _: v["critic.type"] != "off",
        f"with {CHOICE} groups of equal rewards have advantages",
        "critic.type",
    ),
)
CONTRADICTIONS = (
    Rule(
        "policy.method.type",
        lambda v, x: x == "full" and v["critic.type"] != "off",
        f'= "{{}}" and {CHOICE} exclude each other: the critic is an adapter over the base model of the policy',
    ),
    Rule(
        "learner.kl_penalty.type",
        lambda v, x: x == "reward" and v["critic.type"] != "off",
        f'= "{{}}" and {CHOICE} exclude each other: the critic learns rewards without it; set "loss"',
    ),
    Rule(
        "replay.type",
        lambda v, x: x != "off" and v["critic.type"] != "off",
        f'= "{{}}" and {CHOICE} exclude each other: the critic judges the groups of its batch only',
    ),
)
METRICS: Mapping[str, str] = {
    "critic/value_loss": "Mean clipped value loss of a token before the critic learned the batch; null without a "
    "critic.",
    "critic/explained_variance": "Share of the variance of returns that values explain, 1 - Var(return - value) / "
    "Var(return), over the tokens of the batch before the critic learned it; null if all returns are equal.",
    "critic/mean_value": "Mean value of a token, in units of the reward.",
}


def complaints(profile: Profile) -> Iterable[Complaint]:
    """Refuse objectives and groups without advantages from rewards, and a learner that has no hooks."""
    if not isinstance(CRITIC.of(profile), ValueHead):
        return
    if not (objective := profile.learner.objective).has_ratio:
        text = f'learner.objective = "{objective.__struct_config__.tag}" and {CHOICE} exclude each other: it learns '
        yield Complaint("learner.objective.type", f"{text}from no advantages")
    for setting in slot_settings(profile, "groups"):
        yield Complaint("critic.type", f"{CHOICE} and {setting} exclude each other: such groups judge themselves")
    if any(actor.mode == "replace" and actor.at == "learner" for actor in profile.actors):
        yield Complaint("critic.type", f"{CHOICE} belongs to the built-in learner, which a custom actor replaces")


def memory(need: MemoryNeed) -> None:
    """Hold a second adapter, with the state of its optimizer."""
    if need.profile is not None and isinstance(CRITIC.of(need.profile), ValueHead):
        need.critic = True


async def prepare(plan: Plan) -> Attach | None:
    """Train on groups with equal rewards too, and let the critic judge them."""
    settings = CRITIC.of(plan.profile)
    if not isinstance(settings, ValueHead):
        return None
    plan.learns_equal = True

    async def attach(run: RunContext) -> None:
        """Make the critic in the learner's thread, with the state of the checkpoint."""
        from attachments.critic.critic import NAME
        from clotho.lanes.compute_thread import finish

        critic = await finish(run.compute.learner.submit(lambda: _critic(run, settings)))
        run.attached.hooks.append(critic)
        run.attached.parts.save(NAME, critic.part)

    return attach


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Yield how well the values explain the returns."""
    if (explained := line.get("critic/explained_variance")) is not None:
        yield f"explained variance {explained:.2f}"


def _critic(run: RunContext, settings: ValueHead) -> CriticUpdates:
    """Return the critic of a run. Raises ModelError, and CheckpointError if that of the checkpoint does not fit."""
    from attachments.critic.critic import NAME, CriticState, CriticUpdates, ValueModel

    learner, turns = run.profile.learner, run.policy_learner.turns
    model = ValueModel(run.policy, settings, learner, turns)
    critic = CriticUpdates(model, settings, learner, max_tokens=run.profile.sampling.max_tokens, turns=turns)
    if (saved := run.attached.parts.saved(NAME, CriticState)) is not None:
        try:
            critic.restore(saved)
        except ValueError as error:
            raise CheckpointError(f"the part 'critic' of the checkpoint cannot be used: {error}") from error
    return critic
