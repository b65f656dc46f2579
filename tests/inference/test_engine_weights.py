"""Weight swaps during decoding: each token has its version, and caches follow the KV cache policy."""

from __future__ import annotations

import numpy as np
import pytest

from clotho.inference.engine import DecodeEngine
from protocols.sampling import Sampling
from tests import model_lanes
from tests.inference.engine_helpers import (
    full_logits,
    log_softmax,
    make_engine,
    make_prompt,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import FixedSource, tiny_source

pytestmark = pytest.mark.usefixtures("read_mode")
"""Tokens are read at once, and one step later."""

LONG = Sampling(max_tokens=20, ignore_eos=True)


def swap(source: FixedSource) -> None:
    """Publish other weights as the next version."""
    source.model.update(model_lanes.scaled(source.model.parameters(), 1.3))
    source.version += 1


def tick_until_sampled(engine: DecodeEngine, tokens: int) -> None:
    """Tick until this number of tokens is sampled."""
    tick_until(engine, lambda: engine.stats().tokens_sampled >= tokens)


@pytest.mark.lanes(read_mode=("sampled on the device",), architecture=("qwen3",))
@pytest.mark.parametrize("architecture", ["qwen3", "lfm2"])
def test_the_version_of_a_token_is_that_of_its_logits(architecture: str) -> None:
    """Under `recompute` each log-probability equals that of its version's model, computed without a cache.

    The engine launches a step before it reads the previous one.
    """
    source = tiny_source(architecture)
    engine = make_engine(source)
    prompts = [make_prompt(5), make_prompt(19, 1), make_prompt(12, 2)]
    answers = [submit_request(engine, prompt, LONG, (i, i + 10)) for i, prompt in enumerate(prompts)]
    weights = [source.model.parameters()]
    for sampled in (24, 66):
        tick_until_sampled(engine, sampled)
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
                reference = log_softmax(by_version[version][len(prompt) + i - 1])
                np.testing.assert_allclose(logprob, reference[completion.tokens[i]], atol=model_lanes.atol(1e-4))


def test_keep_continues_with_the_caches_of_the_old_weights() -> None:
    """No prompt is prefilled again, and tokens after the swap have the new version."""
    source = tiny_source()
    engine = make_engine(source)
    answer = submit_request(engine, make_prompt(8), LONG)
    tick_until_sampled(engine, 6)
    before = engine.stats().prefill_tokens
    swap(source)
    engine.weights_changed("keep")
    run(engine)
    assert engine.stats().prefill_tokens == before
    versions = answer.completions[0].versions
    assert versions.count(0) in (6, 7)
    assert versions.count(1) == 20 - versions.count(0)


def test_recompute_restarts_a_prefill_in_progress() -> None:
    """A prompt is never prefilled by two versions."""
    source = tiny_source()
    engine = make_engine(source, prefill_chunk=10)
    answer = submit_request(engine, make_prompt(60), LONG)
    engine.tick()
    engine.tick()
    swap(source)
    engine.weights_changed("recompute")
    run(engine)
    completion = answer.completions[0]
    logits = full_logits(source.model, [*make_prompt(60), *completion.tokens])
    reference = [log_softmax(logits[59 + i])[t] for i, t in enumerate(completion.tokens)]
    np.testing.assert_allclose(completion.logprobs, reference, atol=model_lanes.atol(1e-4))


def test_recompute_prefills_the_prompt_of_a_split_group_again() -> None:
    """The retained prompt of the waiting rows belongs to the old weights."""
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=2)
    answer = submit_request(engine, make_prompt(8), LONG, range(4))
    tick_until_sampled(engine, 10)
    swap(source)
    engine.weights_changed("recompute")
    run(engine)
    assert len(answer.completions) == 4
    last = answer.completions[3]
    assert set(last.versions) == {1}
    logits = full_logits(source.model, [*make_prompt(8), *last.tokens])
    np.testing.assert_allclose(last.logprobs[0], log_softmax(logits[7])[last.tokens[0]], atol=model_lanes.atol(1e-4))
