"""The teacher that a profile names: a model of this process, one behind a server, or the policy itself."""

from __future__ import annotations

from attachments.distillation.scoring import TeacherPrompts, own_prompt
from attachments.distillation.sections import DISTILLATION, DistillationSection
from attachments.distillation.teacher import Encode, GroupTeacher
from training_run.run import RunContext


def encoder_of(settings: DistillationSection) -> Encode:
    """Return what encodes texts as the teacher reads them. Raises ModelError, and ProfileError for its server."""
    if settings.is_served:
        from attachments.distillation.served_teacher import ServedTeacher

        return ServedTeacher(settings).encode
    from attachments.distillation.local_teacher import encoder

    return encoder(settings.teacher)


async def teacher_of(run: RunContext) -> tuple[GroupTeacher, TeacherPrompts]:
    """Return the teacher of a run, and what it reads. Raises ModelError, and ProfileError for its server."""
    settings, data = DISTILLATION.of(run.profile), run.profile.data
    top = settings.top_k if settings.loss == "forward_kl" else 0
    if settings.is_own:
        from attachments.distillation.own_teacher import HintedPrompts, OwnTeacher

        context = run.policy.context_length
        prompts = HintedPrompts(settings.hint, run.policy.tokenizer, system=data.system, context_length=context)
        return OwnTeacher(run.sampler, top=top), prompts
    if settings.is_served:
        from attachments.distillation.served_teacher import ServedTeacher

        return ServedTeacher(settings), own_prompt
    from attachments.distillation.local_teacher import load_teacher

    teacher = await load_teacher(
        settings.teacher,
        run.compute,
        top=top,
        micro_batch_tokens=run.profile.learner.micro_batch_tokens,
        turn_seconds=run.profile.learner.max_turn_ms / 1000.0,
    )
    return teacher, own_prompt
