"""One completion of a scored group, with all that its environment says of it, in the learner's form."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clotho.config.schema import LearnerSection
from clotho.scoring.sequences import TeacherRows, TrainingSequence, drawn_T
from protocols.sampling import Completion
from protocols.score import ScoredGroup, TeacherTokens


def training_sequence(
    number: int, group: ScoredGroup, i: int, advantage_T: NDArray[np.float64], share: float, settings: LearnerSection
) -> TrainingSequence:
    """Completion `i` of a group, the `number`-th of the update; share: the coefficient of its tokens.

    Reference and teacher are left out where the settings do not learn from them. Raises ValueError where the reference
    is missing.
    """
    completion = group.group.completions[i]
    weight_T = drawn_T(completion).astype(np.float32)
    distils = settings.distillation_weight > 0 and bool(group.teacher)
    return TrainingSequence(
        group=number,
        prompt=group.group.prompt.tokens,
        tokens=completion.tokens,
        behaviour_T=np.asarray(completion.logprobs, dtype=np.float32),
        version_T=np.asarray(completion.versions, dtype=np.int32),
        advantage_T=advantage_T.astype(np.float32),
        weight_T=weight_T,
        coefficient_T=np.float32(share) * weight_T,
        supports=completion.supports,
        drawn_T=drawn_T(completion) if completion.drawn else None,
        temperature=temperature_of(group, i),
        reference_T=_reference_T(group, i) if given_reference(settings) else None,
        teacher=_teacher_rows(group.teacher[i], completion) if distils else None,
    )


def given_reference(settings: LearnerSection) -> bool:
    """Whether the KL penalty is towards what the groups bring."""
    return settings.kl_beta > 0 and settings.reference == "environment"


def temperature_of(group: ScoredGroup, i: int) -> float:
    """At which completion `i` was drawn; 0: the run's."""
    return group.temperatures[i] if group.temperatures else 0.0


def _reference_T(group: ScoredGroup, i: int) -> NDArray[np.float32]:
    if not group.reference_logprobs:
        raise ValueError(
            f"{_name(group)} brings no reference log-probabilities, which learner.reference = 'environment' learns from"
        )
    return np.asarray(group.reference_logprobs[i], dtype=np.float32)


def _teacher_rows(teacher: TeacherTokens, completion: Completion) -> TeacherRows:
    """The probabilities of its alternatives at drawn tokens, of each token in shares of their sum."""
    at_D = np.flatnonzero(drawn_T(completion))
    token_D_K = np.asarray([teacher.tokens[t] for t in at_D], dtype=np.int32).reshape(len(at_D), -1)
    logp_D_K = np.asarray([teacher.logprobs[t] for t in at_D], dtype=np.float64).reshape(token_D_K.shape)
    largest_D_1 = np.max(logp_D_K, axis=-1, keepdims=True, initial=-np.inf)
    p_D_K = np.exp(logp_D_K - np.where(np.isneginf(largest_D_1), 0.0, largest_D_1))
    sum_D_1 = p_D_K.sum(axis=-1, keepdims=True)
    T, K = len(completion.tokens), max(1, token_D_K.shape[1])
    rows = TeacherRows(np.full((T, K), -1, dtype=np.int32), np.zeros((T, K), dtype=np.float32))
    rows.token_T_K[at_D, : token_D_K.shape[1]] = np.where(p_D_K == 0, -1, token_D_K)
    rows.share_T_K[at_D, : token_D_K.shape[1]] = p_D_K / np.where(sum_D_1 == 0, 1.0, sum_D_1)
    return rows


def _name(group: ScoredGroup) -> str:
    return f"group {group.group.prompt.group_id}"
