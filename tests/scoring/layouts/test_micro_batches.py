"""Cutting sequences into micro-batches, in every layout."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from clotho.scoring.layouts.micro_batches import LAYOUTS, build_micro_batches
from clotho.scoring.layouts.rows import PackedInputs, PaddedInputs
from clotho.scoring.layouts.shared_prefix import SharedInputs
from clotho.scoring.sequences import MicroBatch, TrainingSequence
from tests.scoring.layouts.reference_scores import random_sequences

SHAPES = ((5, (9, 3, 1, 6)), (12, (4, 20)), (1, (2,)), (3, (1, 1)), (33, (40, 7, 7)))


def context(inputs: Any, position: int) -> tuple[int, ...]:
    """Read the tokens back that the hidden state at a flat position has seen."""
    if isinstance(inputs, PaddedInputs):
        row, column = divmod(position, inputs.tokens_B_S.shape[1])
        return tuple(inputs.tokens_B_S[row, : column + 1].tolist())
    if isinstance(inputs, PackedInputs):
        row, column = divmod(position, inputs.tokens_R_S.shape[1])
        return tuple(inputs.tokens_R_S[row, inputs.start_R_S[row, column] : column + 1].tolist())
    assert isinstance(inputs, SharedInputs)
    if position < inputs.tokens_F_P.size:
        row, column = divmod(position, inputs.tokens_F_P.shape[1])
        return tuple(inputs.tokens_F_P[row, : column + 1].tolist())
    row, column = divmod(position - inputs.tokens_F_P.size, inputs.tokens_B_C.shape[1])
    prompt = inputs.prompt_B[row]
    before = inputs.tokens_F_P[prompt, : inputs.length_F[prompt]].tolist()
    return (*before, *inputs.tokens_B_C[row, : column + 1].tolist())


def positions(micro: MicroBatch) -> int:
    """How many the blocks compute."""
    return sum(array.size for name, array in micro.inputs._asdict().items() if name.startswith("tokens"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 40, 100, 300, 10_000])
def test_every_token_is_placed_once_right_after_what_comes_before_it(layout: str, budget: int) -> None:
    """Whatever layout and budget: the same tokens after the same contexts, with their own numbers."""
    sequences = random_sequences(SHAPES)
    batches = build_micro_batches(sequences, layout=layout, budget=budget)
    assert sorted(member for micro in batches for member in micro.members) == list(range(len(sequences)))
    for micro in batches:
        table = micro.table
        for b, member in enumerate(micro.members):
            s, mine_N = sequences[member], np.flatnonzero(table.sequence_N == b)[: len(sequences[member].tokens)]
            seen = [context(micro.inputs, int(position)) for position in table.position_N[mine_N]]
            assert seen == [s.prompt + s.tokens[:t] for t in range(len(s.tokens))]
            assert tuple(table.target_N[mine_N].tolist()) == s.tokens
            for name in ("rollout_logp", "version", "advantage", "loss_mask", "loss_weight"):
                assert getattr(table, f"{name}_N")[mine_N].tolist() == getattr(s, f"{name}_T").tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 100, 10_000])
def test_only_sampled_tokens_are_scored_after_their_context(layout: str, budget: int) -> None:
    """What the policy did not draw is part of the context, and has no row of its own."""
    rng, plain = np.random.default_rng(2), random_sequences(SHAPES)
    sampled = [rng.random(len(s.tokens)) < 0.5 for s in plain]
    for sampled_mask_T in sampled:
        sampled_mask_T[rng.integers(len(sampled_mask_T))] = True
    sequences = [s._replace(sampled_mask_T=sampled_mask_T) for s, sampled_mask_T in zip(plain, sampled, strict=True)]
    for micro in build_micro_batches(sequences, layout=layout, budget=budget):
        table = micro.table
        real = sum(int(sampled[member].sum()) for member in micro.members)
        assert len(table.target_N) == -(-real // 64) * 64
        rows = iter(range(real))
        for b, member in enumerate(micro.members):
            s = sequences[member]
            for t in np.flatnonzero(sampled[member]).tolist():
                n = next(rows)
                assert (table.sequence_N[n], table.target_N[n]) == (b, s.tokens[t])
                assert context(micro.inputs, int(table.position_N[n])) == s.prompt + s.tokens[:t]
                assert (table.advantage_N[n], table.loss_weight_N[n]) == (s.advantage_T[t], s.loss_weight_T[t])
        assert not table.loss_mask_N[real:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 60, 100, 300])
def test_a_micro_batch_is_within_its_budget_or_no_larger_than_a_sequence_alone(layout: str, budget: int) -> None:
    """Padding counts, and so do both passes over shared prefixes."""
    sequences = random_sequences(SHAPES)
    for micro in build_micro_batches(sequences, layout=layout, budget=budget):
        alone = [build_micro_batches([sequences[m]], layout=layout, budget=budget)[0] for m in micro.members]
        assert positions(micro) <= max(budget, *map(positions, alone))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 100, 10_000])
def test_whole_groups_stay_together_within_the_budget(layout: str, budget: int) -> None:
    """Only a group that is longer alone exceeds it; groups are numbered in their micro-batch."""
    sequences = random_sequences(SHAPES)
    batches = build_micro_batches(sequences, layout=layout, budget=budget, whole_groups=True)
    found = [{sequences[member].group for member in micro.members} for micro in batches]
    assert sorted(group for groups in found for group in groups) == sorted({one.group for one in sequences})
    assert len(batches) == {1: 5, 10_000: 1}.get(budget, len(batches))
    for micro, groups in zip(batches, found, strict=True):
        assert positions(micro) <= budget or len(groups) == 1
        assert len({*zip(micro.group_B.tolist(), (sequences[m].group for m in micro.members), strict=True)}) == len(
            groups
        )
        assert set(micro.group_B.tolist()) == set(range(len(groups)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_of_the_table_weighs_nothing_and_repeats_its_first_token(layout: str) -> None:
    """The table has a bucketed length; what fills it is as finite as the first token."""
    (micro,) = build_micro_batches(random_sequences(((2, (3,)),)), layout=layout, budget=100)
    table = micro.table
    assert len(table.loss_mask_N) == 64
    assert not table.loss_mask_N[3:].any()
    assert not table.loss_weight_N[3:].any()
    for row_N in (table.position_N, table.target_N, table.sequence_N, table.rollout_logp_N, table.version_N):
        assert set(row_N[3:].tolist()) == {row_N[0].item()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_input_gives_equal_bytes(layout: str) -> None:
    """Nothing depends on anything else."""

    def everything() -> list[bytes]:
        batches = build_micro_batches(random_sequences(SHAPES), layout=layout, budget=100)
        return [array.tobytes() for m in batches for array in (*m.table, *m.inputs) if array is not None]

    assert everything() == everything()


def with_supports(sequence: TrainingSequence, *supports: list[int]) -> TrainingSequence:
    """The same, with what could have been sampled."""
    return sequence._replace(supports=tuple(np.asarray(s, dtype="<u4").tobytes() for s in supports))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_supports_become_rows_that_end_in_padding(layout: str) -> None:
    """One row per token, of a bucketed width; sequences without supports lie in a micro-batch without."""
    recorded, other = random_sequences(((2, (2,)), (2, (2,))))
    recorded = with_supports(recorded, [3, 8, 2**31 - 1], [5])
    with_none, with_some = build_micro_batches([recorded, other], layout=layout, budget=10_000)
    assert (with_none.members, with_none.table.support_N_K) == ((1,), None)
    support_N_K = with_some.table.support_N_K
    assert support_N_K is not None
    assert support_N_K.shape == (64, 8)
    assert support_N_K[0].tolist() == [3, 8, 2**31 - 1, *[-1] * 5]
    assert support_N_K[1].tolist() == [5, *[-1] * 7]
    assert (support_N_K[2:] == support_N_K[0]).all()


def test_a_support_without_tokens_is_refused() -> None:
    """It would give its token the probability of nothing."""
    (sequence,) = random_sequences(((2, (2,)),))
    with pytest.raises(ValueError, match="the sampled token"):
        build_micro_batches([with_supports(sequence, [3], [])], layout="padded", budget=100)


def test_supports_of_unsampled_tokens_may_be_empty() -> None:
    """NullSampleLog looks at them."""
    (sequence,) = random_sequences(((2, (3,)),))
    sequence = with_supports(sequence, [3, 4], [], [5])._replace(sampled_mask_T=np.array([True, False, True]))
    (micro,) = build_micro_batches([sequence], layout="padded", budget=100)
    assert micro.table.support_N_K is not None
    assert micro.table.support_N_K[:2, :2].tolist() == [[3, 4], [5, -1]]


def test_auto_shares_prompts_where_that_saves_an_eighth() -> None:
    """A long prompt of several completions is worth a second pass, a single completion is not."""
    kinds = Counter[str]()
    for shapes in (((60, (9, 9, 9)),), ((60, (9,)),), ((2, (40, 41, 42)),)):
        (micro,) = build_micro_batches(random_sequences(shapes), layout="auto", budget=10_000)
        kinds[type(micro.inputs).__name__] += 1
    assert kinds == {"SharedInputs": 1, "PaddedInputs": 2}
