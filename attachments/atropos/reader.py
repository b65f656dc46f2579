"""Reads groups from environments: validation, log-probabilities, duplicates, and the message for the learner."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from attachments.atropos.sample_log import (
    SampledSequence,
    SampleLog,
    sampled_sequence,
    token_versions,
    trained_spans,
)
from attachments.atropos.validation import (
    Bounds,
    CheckedGroup,
    InvalidGroup,
    WireGroup,
    check,
    decode_group,
    environment_id,
    teacher_tokens,
)
from clotho.lanes.daemon_threads import DaemonThreads
from clotho.settings.learner import EnvironmentReference, LearnerSection
from clotho.settings.objectives import BatchAdvantage, EnvironmentAdvantage
from protocols.errors import GenerationError
from protocols.prompt import Problem, Prompt, placeholder_prompt
from protocols.rollout import (
    Discarded,
    DiscardReason,
    GroupOutcome,
    RolloutGroup,
    ScoredGroup,
    TeacherTokens,
)
from protocols.sampling import Completion, FinishReason, PromptLogprobs, Sampling, restricts_support, turns_of

ADVANTAGES_ACROSS_GROUPS = (BatchAdvantage, EnvironmentAdvantage)
"""Types of `learner.objective.advantage` with which a zero-variance group can have advantages."""


class ValidGroup(Struct, frozen=True, kw_only=True):
    """A valid group, and how each of its sequences was sampled."""

    group: WireGroup
    checked: CheckedGroup
    sequences: list[SampledSequence]
    teacher: tuple[TeacherTokens, ...]


def _completion_part(rows: Sequence[NDArray[Any]], common: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row_T[common:].tolist()) for row_T in rows)


MAX_NAMES = 64
MAX_RECENT_GROUPS = 4096
ENV_ID_LIMIT = 2**31


class EnvironmentNames:
    """Names of environments: at most `MAX_NAMES` different names; every further environment is `other`.

    The name is the client label of the environment's HTTP requests. The label is stored under the environment's number
    for groups that contain no recorded completion.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._labels: dict[int, str] = {}

    def name(self, env_id: int | None, client_label: str = "") -> str:
        """Return the name of the environment with this number and client label."""
        number = env_id if env_id is not None and 0 <= env_id < ENV_ID_LIMIT else None
        if client_label and number is not None and (number in self._labels or len(self._labels) < MAX_NAMES):
            self._labels[number] = client_label
        label = client_label or (self._labels.get(number, "") if number is not None else "")
        name = label or ("environment" if number is None else f"environment {number}")
        if name not in self._names and len(self._names) >= MAX_NAMES:
            return "other"
        self._names.add(name)
        return name


class RecentGroups:
    """Hashes of the latest `MAX_RECENT_GROUPS` groups."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._known)

    def add(self, group: WireGroup) -> bool:
        """Add a group. Returns True if an equal group has been added before.

        Groups are equal if their tokens, masks, scores and log-probabilities are equal. Without the log-probabilities,
        equal short completions of two policy versions would count as duplicates.
        """
        key = _group_hash(group)
        if key in self._known:
            return True
        if len(self._known) == MAX_RECENT_GROUPS:
            del self._known[next(iter(self._known))]
        self._known[key] = None
        return False


def _group_hash(group: WireGroup) -> bytes:
    """Return 128 bits of BLAKE2b over all rows, each preceded by its length."""
    digest = blake2b(digest_size=16)
    for integers in (*group.tokens, *group.masks):
        digest.update(len(integers).to_bytes(8, "little") + np.array(integers, dtype=np.int32).tobytes())
    for numbers in (group.scores, *(group.inference_logprobs or ())):
        digest.update(len(numbers).to_bytes(8, "little") + np.array(numbers, dtype=np.float64).tobytes())
    return digest.digest()


Recompute = Callable[[tuple[int, ...], float], Awaitable[PromptLogprobs]]
"""(tokens, temperature) -> log-probabilities of every token but the first, under the policy that serves now."""


class _Duplicate(Exception):
    """An equal group has been received before."""


class GroupReader:
    """Converts a group from JSON to a message for the learner, or to a `Discarded` message with the reason.

    A discarded invalid group keeps neither tokens nor completions. Parsing and validation run in a worker thread, one
    group at a time.
    """

    def __init__(
        self,
        *,
        sample_log: SampleLog,
        bounds: Bounds,
        decode: Callable[[Sequence[int]], str],
        recompute: Recompute,
        sampling: Sampling,
        learner: LearnerSection,
        missing_logprobs: Literal["recompute", "refuse"],
    ) -> None:
        """sample_log: completions that the engine sampled for environments. bounds: of the policy.

        decode: tokens -> text; may be called from worker threads.
        """
        self._sample_log, self._bounds, self._decode, self._recompute = sample_log, bounds, decode, recompute
        self._sampling, self._learner, self._missing_logprobs = sampling, learner, missing_logprobs
        self._threads = DaemonThreads("groups", 1, wait_seconds=math.inf, work_seconds=math.inf)
        self._names = EnvironmentNames()
        self._recent = RecentGroups()

    async def read(self, raw: Raw, *, group_id: int, version: int) -> GroupOutcome:
        """Read a group. version: policy version that serves now. Never raises because of the contents of `raw`."""
        discard = partial(self._discarded, raw, group_id)
        try:
            valid = await self._threads.run(lambda: self._validate(raw, version))
            if any(sequence.missing for sequence in valid.sequences):
                await self._recompute_missing(valid)
            return await self._threads.run(lambda: self._message(valid, group_id))
        except _Duplicate:
            return await discard("duplicate", "an equal group has been received before")
        except InvalidGroup as error:
            return await discard("invalid", str(error))
        except GenerationError as error:
            return await discard("generation_error", str(error))

    def _validate(self, raw: Raw, version: int) -> ValidGroup:
        group = decode_group(raw)
        checked = check(group, self._bounds)
        self._record_label(group, checked)
        learner = self._learner
        if isinstance(learner.objective.advantage, EnvironmentAdvantage) and not checked.advantages:
            raise InvalidGroup('advantages: missing, but learner.objective.advantage = "environment" needs them')
        if isinstance(learner.reference, EnvironmentReference) and not checked.reference:
            raise InvalidGroup('ref_logprobs: missing, but learner.kl_penalty.reference = "environment" needs them')
        teacher = teacher_tokens(group, checked, self._bounds.vocab_size) if learner.distillation_weight else ()
        sequences = [
            sampled_sequence(
                i, tokens, checked, self._sample_log, version=version, temperature=self._sampling.temperature
            )
            for i, tokens in enumerate(group.tokens)
        ]
        self._check_missing(sequences)
        # Without log-probabilities an equal group is not a duplicate: an environment may send the same text again.
        has_logprobs = not any(sequence.missing for sequence in sequences)
        if has_logprobs and self._recent.add(group):
            raise _Duplicate
        return ValidGroup(group=group, checked=checked, sequences=sequences, teacher=teacher)

    def _record_label(self, group: WireGroup, checked: CheckedGroup) -> None:
        """Record the client label of the environment, also for a group that is invalid for another reason."""
        for tokens, trained_T in zip(group.tokens, checked.trained, strict=True):
            for start, end in trained_spans(trained_T)[:1]:
                if (sampled := self._sample_log.find(tokens, start, end)) and sampled.client_label:
                    self._names.name(group.env_id, sampled.client_label)
                    return

    def _check_missing(self, sequences: Sequence[SampledSequence]) -> None:
        for i, sequence in enumerate(sequences):
            if sequence.unrecorded and restricts_support(self._sampling):
                start, end = sequence.unrecorded[0]
                raise InvalidGroup(
                    f"tokens[{i}][{start}:{end}]: not in the sample log, so its top_p/top_k/min_p support is unknown"
                )
            if sequence.missing and self._missing_logprobs == "refuse":
                start, end = sequence.missing[0]
                raise InvalidGroup(
                    f"inference_logprobs: missing, and tokens[{i}][{start}:{end}] is not in the sample log "
                    '(atropos.missing_logprobs = "recompute" computes them)'
                )

    async def _recompute_missing(self, valid: ValidGroup) -> None:
        """Compute the missing log-probabilities under the policy that serves now."""
        for tokens, sequence in zip(valid.group.tokens, valid.sequences, strict=True):
            if sequence.missing:
                scored = await self._recompute(tuple(tokens), sequence.temperature)
                logprob_T = np.array((0.0, *scored.logprobs), dtype=np.float32)
                for start, end in sequence.missing:
                    sequence.logprob_T[start:end] = np.minimum(logprob_T[start:end], 0.0)
                    sequence.version_T[start:end] = scored.version

    def _message(self, valid: ValidGroup, group_id: int) -> GroupOutcome:
        """Return the message for the learner; a zero-variance group is discarded with its completions and rewards.

        The prompt is the common prefix of all sequences before the first sampled token. The rest of a sequence is its
        completion.
        """
        checked, sequences, learner = valid.checked, valid.sequences, self._learner
        client_label = next((sequence.client_label for sequence in sequences if sequence.client_label), "")
        source = self._names.name(valid.group.env_id, client_label)
        prefix = tuple(valid.group.tokens[0][: checked.common])
        problem = Problem(prompt=self._decode(prefix), answer="", type=source)
        prompt = Prompt(group_id=group_id, problem=problem, tokens=prefix, seed=0, source=source)
        completions = tuple(self._completion(valid, i) for i in range(len(sequences)))
        temperatures = tuple(sequence.temperature for sequence in sequences)
        differences = [sequence.max_difference for sequence in sequences if sequence.max_difference is not None]
        needs_reference = isinstance(learner.reference, EnvironmentReference)
        scored = ScoredGroup(
            group=RolloutGroup(prompt=prompt, completions=completions),
            rewards=checked.rewards,
            parts={},
            token_advantages=_completion_part(checked.advantages, checked.common),
            reference_logprobs=_completion_part(checked.reference, checked.common) if needs_reference else (),
            temperatures=temperatures if set(temperatures) != {self._sampling.temperature} else (),
            zero_advantage=checked.zero_advantage if any(checked.zero_advantage) else (),
            teacher=valid.teacher,
            logprob_error=max(differences, default=None),
        )
        has_signal = (
            checked.advantages or valid.teacher or isinstance(learner.objective.advantage, ADVANTAGES_ACROSS_GROUPS)
        )
        return scored if has_signal else scored.unless_equal()

    def _completion(self, valid: ValidGroup, index: int) -> Completion:
        common, sequence = valid.checked.common, valid.sequences[index]
        trained_T = valid.checked.trained[index]
        tokens = valid.group.tokens[index][common:]
        sampled = () if trained_T[common:].all() else tuple(trained_T[common:].tolist())
        text = self._decode(tokens)
        supports = tuple(sequence.supports.get(t, b"") for t in range(common, trained_T.size))
        return Completion(
            tokens=tuple(tokens),
            logprobs=tuple(sequence.logprob_T[common:].tolist()),
            versions=tuple(token_versions(sequence, trained_T)[common:].tolist()),
            text=text,
            finish_reason=sequence.finish_reason or self._finish_reason(trained_T),
            supports=supports if any(supports) else (),
            routes=sequence.routes if trained_T[-1] else None,  # tokens behind the last span have no routes
            sampled=sampled,
            turns=turns_of(tokens, sampled, text, self._decode),
        )

    def _finish_reason(self, trained_T: NDArray[Any]) -> FinishReason:
        """Return the finish reason of a sequence that is not in the sample log, from its length."""
        spans = trained_spans(trained_T)
        full = spans and spans[-1][1] - spans[-1][0] >= self._sampling.max_tokens
        return "length" if full or trained_T.size >= self._bounds.context_length else "stop"

    async def _discarded(self, raw: Raw, group_id: int, reason: DiscardReason, detail: str) -> Discarded:
        source = await self._threads.run(lambda: self._names.name(environment_id(raw)))
        return Discarded(prompt=placeholder_prompt(group_id, source), reason=reason, detail=detail)
