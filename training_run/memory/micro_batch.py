"""Shape of the largest micro-batch of an update, computed by the code that builds the real micro-batches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import Struct

from clotho.models.blocked_attention import queries_at_once
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.layouts.rows import PackedInputs, PaddedInputs
from clotho.scoring.layouts.shared_prefix import SharedInputs
from clotho.scoring.sequences import MicroBatch, TrainingSequence
from clotho.settings.objectives import PreferenceObjective
from training_run.memory.need import memory_need
from training_run.profile.schema import Profile


class BlockPass(Struct, frozen=True, kw_only=True):
    """One forward pass over the blocks: `rows` rows of `queries` positions that attend to `keys` positions."""

    rows: int
    queries: int
    keys: int


class AttendedPairs(NamedTuple):
    """Pairs of query and key whose scores exist at once in a block of the model.

    whole: in all passes whose attention is computed in one piece, whose probabilities the backward pass needs. divided:
    in one block of queries of the largest other pass.
    """

    whole: int
    divided: int


class MicroBatchShape(Struct, frozen=True, kw_only=True):
    """Passes over the blocks, and the number of positions that go through the output head.

    several: whether an optimizer step has more than one micro-batch.
    """

    passes: tuple[BlockPass, ...]
    scored: int
    several: bool

    @property
    def positions(self) -> int:
        """Number of positions that the blocks compute, padding included."""
        return sum(one.rows * one.queries for one in self.passes)

    def pairs(self, *, divides: bool) -> AttendedPairs:
        """Return the pairs of query and key. divides: whether the model lets attention of long rows be divided."""
        whole = divided = 0
        for one in self.passes:
            queries = queries_at_once(one.queries, one.keys) if divides else one.queries
            pairs = one.rows * queries * one.keys
            whole, divided = (whole + pairs, divided) if queries == one.queries else (whole, max(divided, pairs))
        return AttendedPairs(whole, divided)


def most_groups(profile: Profile) -> int:
    """Return the largest number of groups of an update, including those that attachments add to its batch."""
    return profile.learner.batch_size + memory_need(profile.engine, profile).groups


def largest_micro_batch(profile: Profile, *, prompt: int, completion: int) -> MicroBatchShape:
    """Return the largest micro-batch of an update whose completions all have the longest length.

    Builds only as many groups as fill two micro-batches. Objectives of preferences learn two completions of a group.
    """
    learner, objective = profile.learner, profile.learner.objective
    size = 2 if isinstance(objective, PreferenceObjective) else profile.sampling.group_size
    most = most_groups(profile)
    groups = -(-most // min(learner.num_minibatches, most))
    enough = 1 + 2 * learner.micro_batch_tokens // (size * completion)
    sequences = [_sequence(group, prompt, completion) for group in range(min(groups, enough)) for _ in range(size)]
    micro_batches = build_micro_batches(
        sequences,
        layout=learner.layout,
        budget=learner.micro_batch_tokens,
        whole_groups=isinstance(objective, PreferenceObjective) and objective.in_pairs,
    )
    largest = max(micro_batches, key=lambda micro: len(micro.table.position_N))
    return MicroBatchShape(
        passes=_passes(largest), scored=len(largest.table.position_N), several=len(micro_batches) > 1
    )


def _sequence(group: int, prompt: int, completion: int) -> TrainingSequence:
    zeros_T = np.zeros(completion, dtype=np.float32)
    return TrainingSequence(
        group=group,
        prompt=(group,) * prompt,
        tokens=(0,) * completion,
        rollout_logp_T=zeros_T,
        version_T=zeros_T.astype(np.int32),
        advantage_T=zeros_T,
        loss_mask_T=zeros_T,
        loss_weight_T=zeros_T,
    )


def _passes(micro: MicroBatch) -> tuple[BlockPass, ...]:
    match micro.inputs:
        case PaddedInputs(tokens_B_S=tokens_R_S) | PackedInputs(tokens_R_S=tokens_R_S):
            rows, length = tokens_R_S.shape
            return (BlockPass(rows=rows, queries=length, keys=length),)
        case SharedInputs(tokens_F_P=tokens_F_P, tokens_B_C=tokens_B_C):
            (prompts, prompt), (rows, length) = tokens_F_P.shape, tokens_B_C.shape
            return (
                BlockPass(rows=prompts, queries=prompt, keys=prompt),
                BlockPass(rows=rows, queries=length, keys=prompt + length),
            )
        case other:
            raise TypeError(f"unknown layout {type(other).__name__}")
