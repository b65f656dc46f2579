"""A batch whose rows come and go equals each row decoded alone, on every kind of cache."""

from __future__ import annotations

import numpy as np
import pytest

from protocols.sampling import Sampling
from tests.inference.engine_helpers import alone, ask, make_engine, prompt_of, run, twin_greedy, twin_logprobs
from tests.small_models import ARCHITECTURES, tiny_source


@pytest.fixture(
    params=["sampled by the host", "sampled by the host, prompts shared", "sampled on the device"], autouse=True
)
def drawn_every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with steps read at once, every prompt held once or once per row; and as on a GPU."""
    shared = request.param == "sampled by the host, prompts shared"
    monkeypatch.setattr("clotho.cpu.kv_cache.MIN_SHARED_TOKENS", 1 if shared else 10**9)
    if request.param == "sampled on the device":
        monkeypatch.setattr("clotho.inference.batch.can_sample_on_cpu", lambda plan: False)


LENGTHS = (1, 13, 30, 2, 21)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_greedy_rows_of_different_lengths_equal_one_full_forward_pass_per_token(architecture: str) -> None:
    """Rows that join and leave at different times draw the twin's tokens with the twin's log-probabilities."""
    source = tiny_source(architecture)
    engine = make_engine(source, prefill_chunk=16)
    asked = []
    for i, length in enumerate(LENGTHS):
        sampling = Sampling(temperature=0.0, max_tokens=8 + 3 * i, ignore_eos=True)
        asked.append((prompt_of(length, i), sampling, ask(engine, prompt_of(length, i), sampling, (1, 2))))
        engine.tick()
        engine.tick()
    run(engine)
    for prompt, sampling, answer in asked:
        expected = twin_greedy(source.model, prompt, sampling)
        for completion in answer.completions:
            assert list(completion.tokens) == expected
            twin = twin_logprobs(source.model, prompt, completion, sampling)
            np.testing.assert_allclose(completion.logprobs, twin, atol=1e-4)
        assert len(answer.completions) == 2


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_sampled_rows_do_not_depend_on_their_neighbours(architecture: str) -> None:
    """Each completion equals the one sampled alone with the same seed, and its log-probabilities equal the twin's."""
    source = tiny_source(architecture)
    engine = make_engine(source, max_num_seqs=5)
    asked = []
    for i, length in enumerate(LENGTHS):
        sampling = Sampling(temperature=0.7 + 0.2 * i, max_tokens=6 + 4 * i, ignore_eos=True)
        asked.append(
            (prompt_of(length, i), sampling, ask(engine, prompt_of(length, i), sampling, (10 * i, 10 * i + 1)))
        )
        engine.tick()
    run(engine)
    for i, (prompt, sampling, answer) in enumerate(asked):
        first, second = answer.completions
        assert first.tokens == alone(source, prompt, sampling, 10 * i).tokens
        assert second.tokens == alone(source, prompt, sampling, 10 * i + 1).tokens
        twin = twin_logprobs(source.model, prompt, first, sampling)
        np.testing.assert_allclose(first.logprobs, twin, atol=1e-4)


SETTINGS = (
    Sampling(temperature=0.8, top_p=0.7, max_tokens=10, ignore_eos=True),
    Sampling(temperature=1.3, top_k=5, max_tokens=14, ignore_eos=True),
    Sampling(min_p=0.1, max_tokens=9, ignore_eos=True),
    Sampling(temperature=0.0, repetition_penalty=1.7, max_tokens=16, ignore_eos=True),
    Sampling(repetition_penalty=1.3, top_p=0.9, top_k=20, min_p=0.02, max_tokens=12, ignore_eos=True),
    Sampling(logit_bias=((5, 4.0), (9, -3.0)), max_tokens=11, ignore_eos=True),
    Sampling(temperature=0.0, top_k=3, top_p=0.5, max_tokens=8, ignore_eos=True),
    Sampling(max_tokens=13, ignore_eos=True),
)


def test_settings_of_each_row_apply_to_it_alone() -> None:
    """Rows with every kind of setting side by side draw as they do alone, with honest log-probabilities."""
    source = tiny_source()
    engine = make_engine(source)
    answers = []
    for i, sampling in enumerate(SETTINGS):
        answers.append(ask(engine, prompt_of(5 + i, i), sampling, (i,)))
        engine.tick()
    run(engine)
    for i, (sampling, answer) in enumerate(zip(SETTINGS, answers, strict=True)):
        completion = answer.completions[0]
        assert completion.tokens == alone(source, prompt_of(5 + i, i), sampling, i).tokens
        twin = twin_logprobs(source.model, prompt_of(5 + i, i), completion, sampling)
        np.testing.assert_allclose(completion.logprobs, twin, atol=1e-4)


def test_long_rows_outgrow_their_buffers_without_a_trace() -> None:
    """Buffers are replaced several times over 200 tokens, beside a short row, and nothing changes."""
    source = tiny_source("gemma3_text")
    engine = make_engine(source)
    long = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)
    answer = ask(engine, prompt_of(3), long)
    for i in range(20):
        ask(engine, prompt_of(40 + i, i), Sampling(max_tokens=9, ignore_eos=True), (i, i + 1))
        for _ in range(7):
            engine.tick()
    run(engine)
    assert list(answer.completions[0].tokens) == twin_greedy(source.model, prompt_of(3), long)


def test_equal_submissions_make_equal_batches() -> None:
    """The same requests in the same order give the same tokens, log-probabilities and number of ticks."""
    outcomes = []
    for _ in range(2):
        engine = make_engine(max_num_seqs=6)
        answers = [ask(engine, prompt_of(4 + i, i), seeds=(i, i + 50)) for i in range(7)]
        run(engine)
        outcomes.append(([a.completions for a in answers], engine.stats()))
    assert outcomes[0] == outcomes[1]
