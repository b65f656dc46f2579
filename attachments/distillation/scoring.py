"""What a teacher adds to groups after their rewards, and which teacher a profile names."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import exp, inf
from typing import Any

import structlog
from msgspec.structs import replace

from attachments.distillation.sections import DISTILLATION, DistillationSection
from attachments.distillation.teacher import Encode, GroupTeacher, TeacherError, TeacherScores, Tokens
from protocols.rollout import Discarded, GroupOutcome, GroupRewards, RolloutGroup, ScoredGroup, TeacherTokens
from protocols.sampling import Completion
from training_run.run import RunContext
from training_run.supervision.hooks import UpdateHook

TeacherPrompts = Callable[[ScoredGroup], Sequence[Tokens | None]]
"""Returns the prompt with which a teacher reads each completion of a group; None: it does not read it."""


def own_prompt(scored: ScoredGroup) -> list[Tokens | None]:
    """Let a teacher read every completion that has a token, behind the prompt of its group."""
    return [scored.group.prompt.tokens if one.tokens else None for one in scored.group.completions]


log = structlog.get_logger(actor="distillation")


class TeacherScoring(UpdateHook):
    """Scores groups with rewards, then with a teacher. A group that the teacher cannot score is discarded."""

    def __init__(
        self, teacher: GroupTeacher, settings: DistillationSection, *, vocab_size: int, prompts: TeacherPrompts
    ) -> None:
        """vocab_size: width of the logits of the policy, which a teacher's may exceed. prompts: of the teacher."""
        self._teacher, self._settings, self._vocab_size, self._prompts = teacher, settings, vocab_size, prompts
        self._taught_completions, self._completions = 0, 0
        self._rewards: GroupRewards | None = None
        self._tokens, self._kl, self._logprob = 0, 0.0, 0.0
        self._seconds, self._failed, self._retries = 0.0, 0, 0

    def around(self, rewards: GroupRewards) -> GroupRewards:
        """Return what scores groups with these rewards and the teacher."""
        self._rewards = rewards
        return self

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Score every completion."""
        assert self._rewards is not None
        scored = await self._rewards.score(group)
        if isinstance(scored, Discarded):
            return scored
        began = time.monotonic()
        try:
            found = await self._scores(group.completions, self._prompts(scored))
        except TeacherError as error:
            if not self._failed:
                log.warning("teacher_failed", error=str(error), hint="groups that it cannot score are discarded")
            self._failed += 1
            return scored.discarded("reward_error", f"teacher: {error}")
        finally:
            self._seconds += time.monotonic() - began
        for completion, one in zip(group.completions, found, strict=True):
            self._count(completion, one)
        return self._taught(scored, found)

    async def _scores(
        self, completions: Sequence[Completion], prompts: Sequence[Tokens | None]
    ) -> list[TeacherScores | None]:
        """Return what the teacher says of each completion behind its prompt; None without one."""
        found: list[TeacherScores | None] = [None] * len(completions)
        for prompt in dict.fromkeys(one for one in prompts if one is not None):
            members = [i for i, one in enumerate(prompts) if one == prompt]
            scores = await self._teacher.score(prompt, [completions[i].tokens for i in members])
            for i, one in zip(members, scores, strict=True):
                found[i] = one
        return found

    def metrics(self) -> Mapping[str, Any]:
        """Return the means over the tokens scored since the last step, and the counts."""
        tokens, retries = self._tokens, self._teacher.retries
        found = {
            "distillation/kl": self._kl / tokens if tokens else None,
            "distillation/teacher_logprob": self._logprob / tokens if tokens else None,
            "distillation/taught": self._taught_completions / self._completions if self._completions else None,
            "distillation/seconds": self._seconds,
            "distillation/retries": retries - self._retries,
            "distillation/failed": self._failed,
        }
        self._tokens, self._kl, self._logprob, self._taught_completions, self._completions = 0, 0.0, 0.0, 0, 0
        self._seconds, self._failed, self._retries = 0.0, 0, retries
        return found

    def _taught(self, scored: ScoredGroup, found: Sequence[TeacherScores | None]) -> ScoredGroup:
        if not self._settings.beside_rewards:
            scored = replace(scored, zero_advantage=tuple(one is not None for one in found))
        if self._settings.is_own and (beta := self._settings.entropy_sensitivity):
            rows = [() if one is None else tuple(exp(-beta * nats) for nats in one.entropies) for one in found]
            scored = replace(scored, teacher_weights=tuple(rows))
        if self._settings.loss == "reverse_kl":
            return replace(scored, teacher_logprobs=tuple(() if one is None else one.logprobs for one in found))
        return replace(scored, teacher=tuple(map(self._alternatives, found)))

    def _alternatives(self, one: TeacherScores | None) -> TeacherTokens:
        """Return the best tokens that the policy has; others have no share."""
        if one is None:
            return TeacherTokens(tokens=(), logprobs=())
        inside = [[(k, nats) if k < self._vocab_size else (0, -inf) for k, nats in position] for position in one.best]
        return TeacherTokens(
            tokens=tuple(tuple(k for k, _ in position) for position in inside),
            logprobs=tuple(tuple(nats for _, nats in position) for position in inside),
        )

    def _count(self, completion: Completion, one: TeacherScores | None) -> None:
        self._completions += 1
        if one is None:
            return
        self._taught_completions += 1
        for t, (own, taught) in enumerate(zip(completion.logprobs, one.logprobs, strict=True)):
            if not completion.sampled or completion.sampled[t]:
                self._tokens += 1
                self._kl += own - taught
                self._logprob += taught


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
    if settings.is_own:
        from attachments.distillation.own_teacher import HintedPrompts, OwnTeacher

        context = run.policy.context_length
        prompts = HintedPrompts(settings.hint, run.policy.tokenizer, system=data.system, context_length=context)
        return OwnTeacher(run.sampler, top=settings.alternatives), prompts
    if settings.is_served:
        from attachments.distillation.served_teacher import ServedTeacher

        return ServedTeacher(settings), own_prompt
    from attachments.distillation.local_teacher import load_teacher

    teacher = await load_teacher(
        settings.teacher,
        run.compute,
        top=settings.alternatives,
        micro_batch_tokens=run.profile.learner.micro_batch_tokens,
        turn_seconds=run.profile.learner.max_turn_ms / 1000.0,
    )
    return teacher, own_prompt
