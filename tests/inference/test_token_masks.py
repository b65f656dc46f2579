"""Excluded tokens and count penalties, on the host and on the device."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clotho.backend import backend
from clotho.inference.rows import TokenMasks
from clotho.inference.sampling import row_parameters, sample, uniforms
from clotho.inference.stop_strings import IncrementalDetokenizer
from clotho.inference.token_masks import MaskedRows
from protocols.sampling import Sampling
from tests.inference.engine_helpers import RecordedEvents, make_engine, processed_logprobs, run, submit_request
from tests.small_models import FixedSource, byte_tokenizer, tiny_source

VOCABULARY = 45
END = 44


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    """Draw sampling parameters of which each exclusion leaves a token."""
    tokens = st.integers(0, VOCABULARY - 1)
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=draw(st.sampled_from([0, 3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 1.25, -0.75])),
        min_tokens=draw(st.integers(0, 6)),
        allowed_token_ids=tuple(draw(st.sampled_from([[], [*range(0, 44, 2), END], [31, 32, 33, END]]))),
        bad_words=tuple(tuple(word) for word in draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=2))),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=2))),
        max_tokens=40,
        ignore_eos=draw(st.booleans()),
    )


@cache
def shared_source() -> FixedSource:
    """Return one model for all examples."""
    return tiny_source()


class Rows:
    """Rows in the middle of their completions."""

    def __init__(self, rows: list[tuple[Sampling, list[int]]]) -> None:
        engine = make_engine(shared_source())
        self.rows = rows
        self.settings = [sampling for sampling, _ in rows]
        self.sampled = [tokens for _, tokens in rows]
        for sampling in self.settings:
            submit_request(engine, (1, 2), sampling)
        entered = [row for job in engine._scheduler.pending for row in job.rows]
        self.masked = MaskedRows(entered, (END,), VOCABULARY, failed=[])

    def masks(self) -> TokenMasks | None:
        """Return the masks of the next step."""
        live = np.ones(len(self.rows), dtype=np.bool_)
        launched = np.array([len(tokens) for tokens in self.sampled])
        return self.masked.at_step(live, launched, lambda slot: np.array(self.sampled[slot], dtype=np.int32))

    def counts(self, slots: list[int]) -> np.ndarray:
        """Count the sampled tokens."""
        return np.stack([np.bincount(self.sampled[slot], minlength=VOCABULARY) for slot in slots]).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(samplings(), st.lists(st.integers(0, VOCABULARY - 1), max_size=8)), min_size=1, max_size=6))
def test_penalties_and_exclusions_equal_an_independent_computation(rows: list[tuple[Sampling, list[int]]]) -> None:
    """Host and device sample the same tokens, and report the log-probabilities of the reference."""
    batch = Rows(rows)
    logits = np.random.default_rng(len(rows)).normal(size=(len(rows), VOCABULARY)).astype(np.float32) * 2
    expected = [
        processed_logprobs(logits_V.astype(np.float64), (), sampling, sampled, (END,))
        for logits_V, (sampling, sampled) in zip(logits, rows, strict=True)
    ]
    if not all(np.isfinite(logp_V).any() for logp_V in expected):
        return  # an exclusion that leaves no token has a test of its own
    plan, masks = row_parameters(batch.settings, VOCABULARY), batch.masks()
    uniform = uniforms(np.arange(len(rows), dtype=np.uint64), np.zeros(len(rows), dtype=np.int64))
    counted = plan.count_penalties.row_R.tolist() if plan.count_penalties is not None else []
    on_device = sample(
        mx.array(logits),
        None if plan.all_greedy else mx.array(uniform),
        plan,
        None,
        count_R_V=mx.array(batch.counts(counted)) if counted else None,
        masks=masks,
    )
    token_B = np.array(on_device.token_B).tolist()
    reference = [logp_V[token] for token, logp_V in zip(token_B, expected, strict=True)]
    np.testing.assert_allclose(np.array(on_device.logp_B), reference, atol=1e-4)
    if (sampler := backend().row_sampler(plan)) is not None:
        on_host = sampler(
            logits.copy(),
            None if plan.all_greedy else uniform,
            plan,
            sampled_R_T=[np.array(batch.sampled[slot], dtype=np.int32) for slot in counted],
            masks=masks,
        )
        assert np.array(on_host.token_B).tolist() == token_B
        np.testing.assert_allclose(np.array(on_host.logp_B), reference, atol=1e-4)


def test_rows_without_exclusions_keep_their_bits() -> None:
    """Tokens and log-probabilities are equal bit for bit, whatever masks and penalties the neighbours have."""
    logits = np.random.default_rng(2).normal(size=(6, 1000)).astype(np.float32) * 3
    uniform = uniforms(np.arange(6, dtype=np.uint64), np.zeros(6, dtype=np.int64))
    neighbour = Sampling(allowed_token_ids=(1, 999), presence_penalty=1.0, frequency_penalty=0.5)
    free = [Sampling(), Sampling(top_k=9), Sampling(temperature=0.5)]
    word_R_W = np.zeros((3, 32), dtype=np.uint32)
    word_R_W[:, 0] = 5
    masks = TokenMasks(np.array([1, 3, 5], dtype=np.int32), word_R_W)
    plain = row_parameters([one for sampling in free for one in (sampling, Sampling())], 1000)
    mixed = row_parameters([one for sampling in free for one in (sampling, neighbour)], 1000)
    sampled = [np.array([3, 3, 7], dtype=np.int32)] * 3
    count = np.stack([np.bincount(tokens, minlength=1000) for tokens in sampled]).astype(np.float32)
    pairs = [
        (
            sample(mx.array(logits), mx.array(uniform), plain, None),
            sample(mx.array(logits), mx.array(uniform), mixed, None, count_R_V=mx.array(count), masks=masks),
        )
    ]
    if (sampler := backend().row_sampler(mixed)) is not None:
        pairs.append(
            (
                sampler(logits.copy(), uniform, plain),
                sampler(logits.copy(), uniform, mixed, sampled_R_T=sampled, masks=masks),
            )
        )
    for expected, found in pairs:
        np.testing.assert_array_equal(np.array(expected.token_B)[::2], np.array(found.token_B)[::2])
        np.testing.assert_array_equal(np.array(expected.logp_B)[::2], np.array(found.logp_B)[::2])
        assert set(np.array(found.token_B)[1::2].tolist()) <= {0, 2}


@pytest.mark.usefixtures("read_mode")
def test_an_exclusion_that_leaves_no_token_does_not_apply() -> None:
    """The only allowed token is the end token, before the minimum length."""
    engine = make_engine()
    answer = submit_request(engine, (1, 2), Sampling(allowed_token_ids=(256,), min_tokens=3, bad_words=((256,),)))
    run(engine)
    assert answer.completions[0].tokens == (256,)
    assert answer.completions[0].logprobs == (0.0,)


def test_no_stop_string_is_found_in_the_minimum_length() -> None:
    """Neither one that lies in its text nor one that begins there."""
    tracker = IncrementalDetokenizer(byte_tokenizer(), ("ab",), min_tokens=3)
    for byte in b"abaXab":
        tracker.push(byte)
    assert tracker.text == "abaX"
    straddling = IncrementalDetokenizer(byte_tokenizer(), ("ab",), min_tokens=3)
    for byte in b"xxab":
        straddling.push(byte)
    straddling.finish()
    assert (straddling.text, straddling.stopped) == ("xxab", None)


@pytest.mark.usefixtures("read_mode")
def test_a_stop_string_ends_a_completion_behind_the_minimum_length() -> None:
    """The same request without a minimum length ends at its first token."""
    lengths = []
    for min_tokens in (0, 5):
        engine = make_engine()
        sampling = Sampling(allowed_token_ids=(65,), stop=("A",), min_tokens=min_tokens, max_tokens=9)
        answer: RecordedEvents = submit_request(engine, (1, 2), sampling)
        run(engine)
        lengths.append((len(answer.completions[0].tokens), answer.completions[0].stop_reason))
    assert lengths == [(1, "A"), (6, "A")]
