"""Weights change while rows run: every token names its version, and caches follow the policy asked for."""

from __future__ import annotations

import numpy as np
import pytest
from mlx.utils import tree_map

from clotho.inference import DecodeEngine
from protocols.sampling import Sampling
from tests.inference.engine_helpers import ask, full_logits, log_softmax, make_engine, prompt_of, run, tick_until
from tests.small_models import FixedSource, tiny_source


@pytest.fixture(params=["sampled by the host", "sampled on the device"], autouse=True)
def drawn_both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with steps read at once, and with steps read one behind, as on a GPU."""
    if request.param == "sampled on the device":
        monkeypatch.setattr("clotho.inference.batch.can_sample_on_cpu", lambda plan: False)


LONG = Sampling(max_tokens=20, ignore_eos=True)


def swap(source: FixedSource) -> None:
    """Publish other weights as the next version."""
    source.model.update(tree_map(lambda a: a * 1.3, source.model.parameters()))
    source.version += 1


def draw_until(engine: DecodeEngine, tokens: int) -> None:
    """Tick until so many tokens have been sampled."""
    tick_until(engine, lambda: engine.stats().tokens_sampled >= tokens)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "lfm2"])
def test_a_tokens_version_is_that_of_the_weights_that_computed_its_logits(architecture: str) -> None:
    """Under `recompute` each token's log-probability is that of its version's model, computed without a cache.

    Though the engine launches a step before it reads the one before it.
    """
    source = tiny_source(architecture)
    engine = make_engine(source)
    prompts = [prompt_of(5), prompt_of(19, 1), prompt_of(12, 2)]
    answers = [ask(engine, prompt, LONG, (i, i + 10)) for i, prompt in enumerate(prompts)]
    weights = [source.model.parameters()]
    for sampled in (24, 66):
        draw_until(engine, sampled)
        swap(source)
        engine.weights_changed("recompute")
        weights.append(source.model.parameters())
    run(engine)
    for prompt, answer in zip(prompts, answers, strict=True):
        for completion in answer.completions:
            assert len(completion.tokens) == 20
            assert set(completion.versions) == {0, 1, 2}
            assert list(completion.versions) == sorted(completion.versions)
            tokens = [*prompt, *completion.tokens]
            by_version = []
            for parameters in weights:
                source.model.update(parameters)
                by_version.append(full_logits(source.model, tokens))
            for i, (logprob, version) in enumerate(zip(completion.logprobs, completion.versions, strict=True)):
                twin = log_softmax(by_version[version][len(prompt) + i - 1])
                np.testing.assert_allclose(logprob, twin[completion.tokens[i]], atol=1e-4)


def test_keep_goes_on_with_the_caches_of_the_old_weights() -> None:
    """No prompt is computed again, and tokens after the swap carry the new version."""
    source = tiny_source()
    engine = make_engine(source)
    answer = ask(engine, prompt_of(8), LONG)
    draw_until(engine, 6)
    before = engine.stats().prefill_tokens
    swap(source)
    engine.weights_changed("keep")
    run(engine)
    assert engine.stats().prefill_tokens == before
    versions = answer.completions[0].versions
    assert versions.count(0) in (6, 7)
    assert versions.count(1) == 20 - versions.count(0)


def test_paused_admission_lets_running_rows_finish_first() -> None:
    """Drain: rows that wait start under the new weights, with prompts computed under them."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=2)
    old = ask(engine, prompt_of(8), LONG, (1, 2))
    tick_until(engine, lambda: engine.running == 2)
    new = ask(engine, prompt_of(8), LONG, (1, 2))
    engine.admission_paused = True
    run(engine)
    assert len(old.completions) == 2
    assert not new.events
    assert engine.running == 0
    swap(source)
    engine.weights_changed("drain")
    engine.admission_paused = False
    run(engine)
    for completion in new.completions:
        assert set(completion.versions) == {1}
        logits = full_logits(source.model, [*prompt_of(8), *completion.tokens])
        twin = [log_softmax(logits[7 + i])[t] for i, t in enumerate(completion.tokens)]
        np.testing.assert_allclose(completion.logprobs, twin, atol=1e-4)


def test_prompts_in_the_middle_of_their_computation_start_again_on_recompute() -> None:
    """Half under the old weights and half under the new would be neither."""
    source = tiny_source()
    engine = make_engine(source, prefill_chunk=10)
    answer = ask(engine, prompt_of(60), LONG)
    engine.tick()
    engine.tick()
    swap(source)
    engine.weights_changed("recompute")
    run(engine)
    completion = answer.completions[0]
    logits = full_logits(source.model, [*prompt_of(60), *completion.tokens])
    twin = [log_softmax(logits[59 + i])[t] for i, t in enumerate(completion.tokens)]
    np.testing.assert_allclose(completion.logprobs, twin, atol=1e-4)


def test_the_rest_of_a_split_group_gets_its_prompt_anew_on_recompute() -> None:
    """The retained prompt of rows that wait for room belongs to the old weights."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=2)
    answer = ask(engine, prompt_of(8), LONG, range(4))
    draw_until(engine, 10)
    swap(source)
    engine.weights_changed("recompute")
    run(engine)
    assert len(answer.completions) == 4
    last = answer.completions[3]
    assert set(last.versions) == {1}
    logits = full_logits(source.model, [*prompt_of(8), *last.tokens])
    np.testing.assert_allclose(last.logprobs[0], log_softmax(logits[7])[last.tokens[0]], atol=1e-4)
