"""On-policy distillation in a run: `distillation.teacher`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attachments.distillation.sections import DISTILLATION
from protocols.sampling import POLICY, in_use
from training_run.profile.rules import Complaint, Rule, slot_settings

if TYPE_CHECKING:
    from clotho.models.tokenizer import ChatTokenizer
    from protocols.finding import Finding
    from protocols.prompt import Problem
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan

TEACHER = "distillation.teacher"


NO_EFFECT = (
    Rule(
        "distillation.loss distillation.top_k distillation.beside_rewards",
        lambda v, _: not v[TEACHER],
        f"{TEACHER} names no teacher",
        TEACHER,
    ),
    Rule(
        "distillation.model distillation.api_key_env distillation.timeout_seconds",
        lambda v, _: not v[TEACHER].startswith(("http://", "https://")),
        f"{TEACHER} is not the URL of a server",
        TEACHER,
    ),
    Rule(
        "distillation.hint distillation.entropy_sensitivity",
        lambda v, _: v[TEACHER] != POLICY,
        f'only {TEACHER} = "{POLICY}" makes the policy its own teacher',
        TEACHER,
    ),
    Rule(
        "distillation.beside_rewards",
        lambda v, _: v[TEACHER] == POLICY,
        f'with {TEACHER} = "{POLICY}" completions without a hint learn from rewards',
        TEACHER,
    ),
    Rule(
        "distillation.top_k",
        lambda v, _: v["distillation.loss"] != "forward_kl",
        'only distillation.loss = "forward_kl" learns the teacher\'s best tokens',
        "distillation.loss",
    ),
    Rule(
        "learner.objective.advantage.type learner.objective.overlong_penalty.type "
        "learner.objective.dynamic_sampling_max_ratio",
        lambda v, _: bool(v[TEACHER]) and v[TEACHER] != POLICY and not v["distillation.beside_rewards"],
        "without distillation.beside_rewards the policy learns from its teacher alone",
        f"{TEACHER} distillation.beside_rewards",
    ),
)
CONTRADICTIONS = (
    Rule(
        "learner.kl_penalty.type",
        lambda v, x: x == "reward" and bool(v[TEACHER]) and not v["distillation.beside_rewards"],
        '= "{}" has no effect: without distillation.beside_rewards no reward is learned; set "loss"',
    ),
)
MAY_CHANGE = ("distillation.model", "distillation.api_key_env", "distillation.timeout_seconds")
METRICS: Mapping[str, str] = {
    "distillation/kl": "Mean of log policy - log teacher over the sampled tokens that the teacher scored since the "
    "line before, in nats: the divergence of the policy from its teacher; null without a teacher.",
    "distillation/teacher_logprob": "Mean log-probability of these tokens under the teacher, in nats.",
    "distillation/taught": "Share of the completions that the teacher scored.",
    "distillation/seconds": "Seconds that groups waited for the teacher since the line before, added up.",
    "distillation/retries": "Requests to the server of the teacher that were repeated since the line before.",
    "distillation/failed": "Groups that the teacher could not score since the line before; they are discarded.",
}


def complaints(profile: Profile) -> Iterable[Complaint]:
    """Refuse what leaves a teacher without effect, or lets it judge another distribution than the policy's."""
    if not DISTILLATION.of(profile).teacher:
        return
    if profile.learner.distillation_weight == 0:
        yield Complaint(TEACHER, f"{TEACHER} has no effect: set learner.distillation_weight, for example to 1")
    for name in in_use(profile.sampling, affects="distribution"):
        text = f"sampling.{name} and {TEACHER} exclude each other: a teacher scores the distribution of its model"
        yield Complaint(f"sampling.{name}", text)
    if not (objective := profile.learner.objective).has_ratio:
        tag = objective.__struct_config__.tag
        text = f'learner.objective = "{tag}" and {TEACHER} exclude each other: it has no advantages of samples'
        yield Complaint("learner.objective.type", text)
    for setting in slot_settings(profile, "groups"):
        yield Complaint(TEACHER, f"{TEACHER} and {setting} exclude each other: such groups have no teacher here")
    if DISTILLATION.of(profile).is_own and not any(one.correct for one in profile.rewards):
        text = f'{TEACHER} = "{POLICY}" needs a reward with correct = true, which says which completions failed'
        yield Complaint(TEACHER, text)
    if any(actor.mode == "replace" and actor.at == "scorer" for actor in profile.actors):
        yield Complaint(TEACHER, f"{TEACHER} belongs to the built-in scorer, which a custom actor replaces")


def may_differ(key: str, old: Profile, new: Profile) -> bool:
    """The server of the teacher may have another address."""
    return key == TEACHER and DISTILLATION.of(old).is_served and DISTILLATION.of(new).is_served


def memory(need: MemoryNeed) -> None:
    """Hold the teacher."""
    if need.profile is not None and (settings := DISTILLATION.of(need.profile)).is_model:
        need.teacher = settings.teacher


def findings_when_loaded(profile: Profile, tokenizer: ChatTokenizer, problems: Sequence[Problem]) -> Iterable[Finding]:
    """Find nothing. Raises ProfileError if the teacher is not there, or has another tokenizer than the policy."""
    if (settings := DISTILLATION.of(profile)).teacher and not settings.is_own:
        from attachments.distillation.scoring import encoder_of
        from attachments.distillation.teacher import require_equal_tokens

        require_equal_tokens(tokenizer, problems, encoder_of(settings), settings.teacher)
    return ()


async def prepare(plan: Plan) -> Attach | None:
    """Train on groups with equal rewards too, and let a teacher score them."""
    profile = plan.profile
    settings = DISTILLATION.of(profile)
    if not settings.teacher:
        return None
    plan.learns_equal = True

    async def attach(run: RunContext) -> None:
        """Load the teacher."""
        from attachments.distillation.scoring import TeacherScoring, teacher_of

        teacher, prompts = await teacher_of(run)
        scoring = TeacherScoring(teacher, settings, vocab_size=run.policy.vocab_size, prompts=prompts)
        run.attached.scoring.append(scoring.around)
        run.attached.hooks.append(scoring)

    return attach


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Yield the distance from the teacher."""
    if (kl := line.get("distillation/kl")) is not None:
        yield f"KL to the teacher {kl:.3g}"
