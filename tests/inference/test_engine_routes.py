"""Recorded routes: the experts that computed each token of a prompt and its completion."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from clotho.models.experts import Mixtures
from protocols.sampling import Completion, Sampling
from tests.inference.engine_helpers import SAMPLED, RecordedEvents, make_engine, make_prompt, run, submit_request
from tests.small_models import FixedSource, tiny_source

ARCHITECTURES = ("qwen3_moe", "qwen3_5_moe", "gpt_oss")
"""Decoded on the host, with recurrent layers on the host, and by MLX with sliding windows."""

LONG = Sampling(max_tokens=12, ignore_eos=True)


def routes_of(completion: Completion) -> NDArray[np.uint8]:
    """Return the routes of a completion, (T, L, K)."""
    routes = completion.routes
    assert routes is not None
    assert routes.number_bytes == 1
    return np.frombuffer(routes.experts, dtype=np.uint8).reshape(-1, routes.layers, routes.per_token)


def check_routes(source: FixedSource, prompt: Sequence[int], completion: Completion) -> None:
    """Compare the routes with those of one pass over the whole sequence; the order of experts is free."""
    mixtures, tokens = Mixtures(source.model), [*prompt, *completion.tokens][:-1]
    with mixtures.recorded() as chosen:
        source.model(mx.array([tokens]))
    expected_T_C = np.array(mixtures.routes(chosen))[0]
    found_T_L_K = routes_of(completion)
    expected_T_L_K = expected_T_C.reshape(found_T_L_K.shape)
    assert found_T_L_K.shape == (len(tokens), len(mixtures.counts), 2)
    assert np.array_equal(np.sort(found_T_L_K, -1), np.sort(expected_T_L_K, -1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_that_join_and_leave_keep_their_routes(architecture: str) -> None:
    """Prompts of rollouts and of clients, alone, shared by rows, and found in the prefix cache."""
    source = tiny_source(architecture)
    engine = make_engine(source, prefix_cache_tokens=1000)
    prompts = [make_prompt(5, 1), make_prompt(9, 2), make_prompt(9, 2), (*make_prompt(9, 2), 4, 5), (7,)]
    answers: list[RecordedEvents] = []
    for i, prompt in enumerate(prompts):
        seeds = (i, i + 10, i + 20)[: 1 + i % 3]
        options = {"record_routes": True, "reuse_prefix": True, "background": i == 0}
        answers.append(submit_request(engine, prompt, Sampling(max_tokens=4 + i, ignore_eos=True), seeds, **options))
        for _ in range(3):
            engine.tick()
    run(engine)
    assert engine.stats().prefix_hits
    for prompt, answer in zip(prompts, answers, strict=True):
        for completion in answer.completions:
            check_routes(source, prompt, completion)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_prompts_of_many_rows_are_stored_once_with_their_routes(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host and in MLX."""
    monkeypatch.setattr("clotho.inference.cache_layout.MIN_SAVED_BYTES", {"cpu": 1, "gpu": 1})
    source = tiny_source(architecture)
    engine = make_engine(source)
    prompt = make_prompt(90)
    answer = submit_request(engine, prompt, SAMPLED, range(6), record_routes=True, background=True)
    run(engine)
    for completion in answer.completions:
        check_routes(source, prompt, completion)


def test_an_interrupted_row_keeps_the_routes_of_the_weights_that_sampled() -> None:
    """Also if new weights compute its tokens again, which later tokens then see."""
    source = tiny_source("qwen3_moe")
    engine = make_engine(source, kv_policy="recompute")
    answer = submit_request(engine, make_prompt(6), LONG, record_routes=True)
    while engine.stats().tokens_sampled < 5:
        engine.tick()
    before = engine._short.batch.table.rows[0]
    engine.weights_changed("recompute")
    assert before is not None
    kept = np.array(before.routes)
    run(engine)
    (completion,) = answer.completions
    assert len(kept) >= 6 + 4
    assert np.array_equal(routes_of(completion)[: len(kept)], kept)
    check_routes(source, make_prompt(6), completion)


def test_no_routes_are_sent_without_a_request_or_without_experts() -> None:
    """A dense model ignores the request."""
    for architecture, wanted in (("qwen3_moe", False), ("qwen3", True)):
        engine = make_engine(tiny_source(architecture))
        answer = submit_request(engine, make_prompt(4), SAMPLED, record_routes=wanted)
        run(engine)
        assert answer.completions[0].routes is None
