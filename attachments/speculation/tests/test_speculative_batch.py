"""Speculation changes neither the tokens of a completion nor their log-probabilities, whatever the drafts are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from attachments.adapters.tests.adapter_models import engine_with_adapters, write_mlx_adapter
from attachments.speculation.drafts import Drafted
from attachments.speculation.sections import HistoryDrafts, PromptDrafts
from attachments.speculation.speculative_batch import accepted_tokens
from clotho.backend import Backend, backend
from clotho.inference.engine import DecodeEngine
from clotho.inference.rows import DraftedTokens, RowParameters
from clotho.inference.sampling import sample
from clotho.inference.scheduler import Row
from clotho.settings.bounds import Off
from protocols.errors import ModelError
from protocols.sampling import Completion, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import (
    RecordedEvents,
    full_logits,
    log_softmax,
    make_engine,
    make_prompt,
    reference_logprobs,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import FixedSource, tiny_source

MODES = ("host", "host, prompts shared", "MLX", "MLX, prompts shared")
HISTORY = HistoryDrafts(max_draft=4)
BOTH_PATHS = pytest.mark.parametrize("engine_mode", ["host", "MLX"], indirect=True)
LENGTHS = (1, 13, 30, 2, 21)


@pytest.fixture(params=MODES)
def engine_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on the host and as on a GPU, with prompts stored once or once per row."""
    mode: str = request.param
    shared = mode.endswith("prompts shared")
    monkeypatch.setattr("clotho.inference.cache_layout.MIN_SAVED_BYTES", {"cpu": 1 if shared else 10**9})
    if mode.startswith("MLX"):
        request.getfixturevalue("device_path")
    elif type(backend()) is Backend:
        pytest.skip("the host path is off, or the device is a GPU")
    else:
        monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SHARED_TOKENS", 1 if shared else 10**9)
    return mode


class OtherDrafts:
    """Drafts of any length, right and wrong: the tokens of `completions` by prompt, of which some are changed."""

    def __init__(self, completions: dict[tuple[int, ...], Sequence[int]]) -> None:
        self._completions = completions

    def propose(self, rows: Sequence[Drafted]) -> dict[int, Sequence[int]]:
        """Return up to four tokens per row; the third is wrong at every other step."""
        drafts: dict[int, Sequence[int]] = {}
        for slot, row, tokens, most in rows:
            known = self._completions.get(row.active.request.prompt, ())
            length = (len(tokens) + row.serial) % 5
            draft = list(known[len(tokens) : len(tokens) + min(length, most)])
            if len(draft) > 2 and len(tokens) % 2:
                draft[2] = (draft[2] + 1) % 256
            if draft:
                drafts[slot] = draft
        return drafts

    def left(self, row: Row) -> None:
        """Nothing is kept per row."""

    def finished(self, row: Row) -> None:
        """Nothing is learnt."""

    def beside(self) -> OtherDrafts:
        """Long rows have the same drafts."""
        return self


SAMPLINGS = (
    Sampling(temperature=0.8, top_p=0.7, max_tokens=14, ignore_eos=True),
    Sampling(temperature=1.3, top_k=5, max_tokens=18, ignore_eos=True),
    Sampling(min_p=0.1, logit_bias=((5, 4.0), (9, -3.0)), max_tokens=9, ignore_eos=True),
    Sampling(temperature=0.0, max_tokens=16, ignore_eos=True),
    Sampling(max_tokens=13, top_logprobs=2, stop_token_ids=(70,)),
)
MASKED = Sampling(bad_words=((80,), (3, 5)), min_tokens=4, max_tokens=12)
PENALISED = Sampling(frequency_penalty=0.5, repetition_penalty=1.2, max_tokens=5, ignore_eos=True)


def submit_all(engine: DecodeEngine, samplings: Sequence[Sampling]) -> list[tuple[tuple[int, ...], RecordedEvents]]:
    """Submit two rows for each prompt; the requests join at different times."""
    submitted = []
    for i, (length, sampling) in enumerate(zip(LENGTHS, samplings, strict=True)):
        prompt = make_prompt(length, i)
        answer = submit_request(
            engine, prompt, sampling, (10 * i, 10 * i + 1), background=True, record_support=sampling.top_k > 0
        )
        submitted.append((prompt, answer))
        engine.tick()
    run(engine)
    return submitted


def check_equal(found: Iterable[Completion], expected: Iterable[Completion]) -> None:
    """Compare everything that is reported of completions."""
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert (one.finish_reason, one.stop_reason, one.supports) == (
            other.finish_reason,
            other.stop_reason,
            other.supports,
        )
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert [[t for t, _ in top] for top in one.top_logprobs] == [[t for t, _ in top] for top in other.top_logprobs]


def test_completions_equal_those_of_plain_decoding(engine_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every sampling parameter, with accepted and rejected drafts, in a batch that rows join and leave."""
    source = tiny_source()
    plain = submit_all(make_engine(source), SAMPLINGS)
    drafts = OtherDrafts({prompt: answer.completions[0].tokens for prompt, answer in plain})
    monkeypatch.setattr("attachments.speculation.speculative_batch.make_drafter", lambda *_: drafts)
    engine = make_engine(source, speculation=HISTORY)
    found = submit_all(engine, SAMPLINGS)
    for (_, one), (_, other) in zip(found, plain, strict=True):
        check_equal(one.completions, other.completions)
    counts = engine.stats().speculation
    assert 0 < counts.accepted_tokens < counts.draft_tokens
    assert counts.accepted_by_position[0] > counts.accepted_by_position[2] > 0


def test_rows_with_masks_or_penalties_are_exact_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with excluded tokens has no drafts. While a row with a penalty runs, no row has drafts."""
    source = tiny_source()
    samplings = (*SAMPLINGS[:3], MASKED, PENALISED)
    plain = submit_all(make_engine(source), samplings)
    drafts = OtherDrafts({prompt: answer.completions[0].tokens for prompt, answer in plain})
    monkeypatch.setattr("attachments.speculation.speculative_batch.make_drafter", lambda *_: drafts)
    engine = make_engine(source, speculation=HISTORY)
    for (_, one), (_, other) in zip(submit_all(engine, samplings), plain, strict=True):
        check_equal(one.completions, other.completions)
    assert engine.stats().speculation.accepted_tokens > 0


def test_rollouts_of_the_same_prompt_are_drafts_of_later_ones(engine_mode: str) -> None:
    """With equal seeds, every draft is accepted: the second epoch needs few steps. Other seeds are exact as well."""
    source, sampling = tiny_source(), Sampling(temperature=0.9, max_tokens=20, ignore_eos=True)
    engine, prompt = make_engine(source, speculation=HISTORY), make_prompt(40)
    steps, answers = [], []
    for seeds in ((1,), (1,), (2, 3, 4)):
        before = engine.stats().decode_steps
        answers.append(submit_request(engine, prompt, sampling, seeds, background=True))
        run(engine)
        steps.append(engine.stats().decode_steps - before)
        if len(steps) == 2:
            assert engine.stats().speculation.passes == sum(steps)
    assert steps[:2] == [20, 4]
    assert answers[0].completions[0].tokens == answers[1].completions[0].tokens
    for completion in answers[2].completions:
        reference = reference_logprobs(source.model, prompt, completion, sampling)
        assert np.abs(completion.logprobs - reference).mean() <= model_lanes.atol(1e-4)
    assert engine.stats().tokens_sampled == 100


def test_prompt_lookup_continues_what_repeats() -> None:
    """Completions of two tokens repeat themselves; they need fewer steps than tokens."""
    two = ((5, 30.0), (9, 30.0))
    source, sampling = tiny_source(), Sampling(logit_bias=two, max_tokens=40, ignore_eos=True)
    plain, engine = make_engine(source), make_engine(source, speculation=PromptDrafts(max_draft=4))
    answers = [submit_request(one, make_prompt(9), sampling) for one in (plain, engine)]
    run(plain)
    run(engine)
    check_equal(answers[1].completions, answers[0].completions)
    assert engine.stats().decode_steps < 35


def test_a_completion_ends_inside_a_draft() -> None:
    """Tokens behind an end token or a stop string are not reported, and a draft does not exceed the limit."""
    source = tiny_source()
    for sampling in (
        Sampling(max_tokens=30, logit_bias=((256, 6.0),)),
        Sampling(max_tokens=7),
        Sampling(max_tokens=30, stop=("\x05",), logit_bias=((5, 6.0),)),
    ):
        engine = make_engine(source, speculation=HISTORY)
        answers = []
        for _ in range(2):
            answers.append(submit_request(engine, make_prompt(6), sampling, (1, 2), background=True))
            run(engine)
        check_equal(answers[1].completions, answers[0].completions)
        assert engine.stats().speculation.accepted_tokens > 0


def test_a_draft_ends_with_a_token_that_ends_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens behind it are not verified, so that they do not count as accepted."""
    drafts = OtherDrafts({make_prompt(5): [256] * 40, make_prompt(6): [70] * 40, make_prompt(7): [256] * 40})
    monkeypatch.setattr("attachments.speculation.speculative_batch.make_drafter", lambda *_: drafts)
    stopping = Sampling(max_tokens=20, logit_bias=((256, -100.0), (70, -100.0)), stop_token_ids=(70,))
    for length, sampling, cut in ((5, stopping, True), (6, stopping, True), (7, SAMPLINGS[0], False)):
        engine = make_engine(speculation=HISTORY)
        submit_request(engine, make_prompt(length), sampling)
        run(engine)
        counts = engine.stats().speculation
        assert (counts.draft_tokens == counts.drafts > 0) is cut


@BOTH_PATHS
def test_rows_with_adapters_are_exact(engine_mode: str, tmp_path: Path) -> None:
    """Rows of the policy, of the base model and of adapters verify their drafts in one pass."""
    source = tiny_source()
    path = write_mlx_adapter(tmp_path / "a", source.model)
    sampling = Sampling(temperature=0.7, max_tokens=10, ignore_eos=True)
    results = []
    for speculation in (Off(), HISTORY):
        engine, _ = engine_with_adapters(source, {"a": path}, speculation=speculation)
        for _ in range(2):
            answers = [
                submit_request(engine, make_prompt(9), sampling, (1, 2), weights=weights, background=True)
                for weights in ("a", "@policy", "@base")
            ]
            run(engine)
        results.append([completion for answer in answers for completion in answer.completions])
    check_equal(results[1], results[0])
    assert engine.stats().speculation.accepted_tokens > 0


@BOTH_PATHS
def test_a_weight_swap_between_ticks_keeps_the_result_exact(engine_mode: str) -> None:
    """Drafts of the old weights are only proposals: every log-probability is that of the version of its token."""
    source, sampling = tiny_source(), Sampling(temperature=1.0, max_tokens=24, ignore_eos=True)
    engine, prompt = make_engine(source, speculation=HISTORY), make_prompt(9)
    submit_request(engine, prompt, sampling, (1, 2), background=True)
    run(engine)
    answer = submit_request(engine, prompt, sampling, (1, 2, 3), background=True)
    weights = [source.model.parameters()]
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 48 + 15)
    source.model.update(model_lanes.scaled(source.model.parameters(), 1.3))
    source.version += 1
    engine.weights_changed("recompute")
    weights.append(source.model.parameters())
    run(engine)
    for completion in answer.completions:
        assert set(completion.versions) == {0, 1}
        tokens, by_version = [*prompt, *completion.tokens], []
        for parameters in weights:
            source.model.update(parameters)
            by_version.append(full_logits(source.model, tokens))
        for i, (logprob, version) in enumerate(zip(completion.logprobs, completion.versions, strict=True)):
            reference = log_softmax(by_version[version][len(prompt) + i - 1])
            np.testing.assert_allclose(logprob, reference[completion.tokens[i]], atol=1e-4)


@pytest.mark.parametrize("architecture", ["gemma3_text", "mamba2"])
def test_a_model_whose_layers_cannot_discard_tokens_is_refused(architecture: str) -> None:
    """Sliding windows and fixed-size states."""
    with pytest.raises(ModelError, match=r"engine\.speculation"):
        make_engine(tiny_source(architecture), speculation=HISTORY)


def test_the_acceptance_rule_is_rejection_sampling() -> None:
    """Enumerated over all drafts and a grid of random numbers.

    A draft x is accepted with probability p(x). Otherwise, the token has the distribution of p without x.
    """
    p_V = np.array([0.5, 0.25, 0.15, 0.1, 0.0], dtype=np.float32)
    grid = 4000
    uniform_B_2 = np.repeat((np.arange(grid, dtype=np.float32)[:, None] + 0.5) / grid, 2, axis=1)
    for draft in range(len(p_V)):
        tokens = DraftedTokens.of(np.zeros(grid, dtype=np.int32), dict.fromkeys(range(grid), (draft,)))
        uniform_N_2 = np.full((2 * grid, 2), 0.5, dtype=np.float32)
        uniform_N_2[tokens.first_B] = uniform_B_2
        with np.errstate(divide="ignore"):
            logits_N_V = np.tile(np.log(p_V), (2 * grid, 1))
        sampled = sample(mx.array(logits_N_V), mx.array(uniform_N_2), RowParameters(all_greedy=False), None)
        token_N = np.array(sampled.token_B)
        accepted_B = accepted_tokens(tokens, token_N)
        assert accepted_B.mean() == pytest.approx(p_V[draft], abs=1e-3)
        replaced = Counter(token_N[tokens.first_B][accepted_B == 0].tolist())
        for token, p in enumerate(p_V):
            residual = 0.0 if token == draft else p / (1.0 - p_V[draft])
            assert replaced[token] / replaced.total() == pytest.approx(residual, abs=1e-3)


def triples(completions: Iterable[Completion]) -> Counter[tuple[int, ...]]:
    """Count the sequences of three tokens of each completion."""
    return Counter(one.tokens[i : i + 3] for one in completions for i in range(0, len(one.tokens) - 2, 3))


def chi_square_p_value(table: NDArray[np.int64]) -> float:
    """Return the probability of a larger chi-square statistic, by the approximation of Wilson and Hilferty (1931)."""
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic, freedom = float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1
    spread = 2.0 / (9.0 * freedom)
    return 1.0 - NormalDist(1.0 - spread, math.sqrt(spread)).cdf((statistic / freedom) ** (1.0 / 3.0))


def sample_many(source: FixedSource, first_seed: int, **settings: Any) -> tuple[list[Completion], DecodeEngine]:
    """Sample 100,000 tokens after one prompt, of five tokens that the filters keep in part."""
    engine = make_engine(source, **settings)
    five = tuple((token, 40.0) for token in (5, 9, 70, 100, 200))
    sampling = Sampling(logit_bias=five, top_k=4, top_p=0.95, temperature=1.2, max_tokens=20, ignore_eos=True)
    completions = []
    for batch in range(20):
        seeds = range(first_seed + 250 * batch, first_seed + 250 * (batch + 1))
        answer = submit_request(engine, make_prompt(5), sampling, tuple(seeds), background=True)
        run(engine)
        completions += answer.completions
    return completions, engine


@pytest.mark.slow
@pytest.mark.parametrize("device", ["host", "MLX"])
def test_the_distribution_of_tokens_equals_that_of_plain_sampling(device: str, request: pytest.FixtureRequest) -> None:
    """A chi-square test over 200,000 tokens, with other seeds for each half."""
    if device == "MLX":
        request.getfixturevalue("device_path")
    source = tiny_source()
    plain, _ = sample_many(source, 0)
    drafted, engine = sample_many(source, 10**6, speculation=HistoryDrafts(max_draft=4))
    assert sum(len(one.tokens) for one in (*plain, *drafted)) == 200_000
    assert engine.stats().speculation.accepted_tokens > 10_000
    counts = [triples(plain), triples(drafted)]
    both = counts[0] + counts[1]
    common = [key for key, number in both.items() if number >= 20]
    rare = [sum(number for key, number in one.items() if key not in set(common)) for one in counts]
    table = np.array([[one[key] for key in common] + [rest] for one, rest in zip(counts, rare, strict=True)])
    table = table[:, table.sum(axis=0) > 0]
    assert len(common) > 20
    assert chi_square_p_value(table) > 0.01
