"""Completions in a changing batch equal completions decoded alone, for every kind of cache."""

from __future__ import annotations

import numpy as np
import pytest

from clotho.backend import Backend, backend
from protocols.sampling import Completion, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import (
    complete_alone,
    make_engine,
    make_prompt,
    reference_logprobs,
    run,
    submit_request,
)
from tests.small_models import ARCHITECTURES, FixedSource, tiny_source

MODES = ("host", "host, prompts shared", "host, rows divided", "MLX", "MLX, prompts shared", "MLX, rows divided")
ON_DEVICE = ("MLX",)
"""The mode of the lanes; in float32 it is the lane of the device path itself."""


def pairs(chosen: dict[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    """Run a test with these architectures in each mode. The host knows some architectures only."""
    rows = [(mode, name) for mode, names in chosen.items() for name in names]
    return pytest.mark.parametrize(("engine_mode", "architecture"), rows, indirect=["engine_mode"])


@pytest.fixture(params=MODES, autouse=True)
def engine_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test on the host and as on a GPU, with prompts stored once or once per row, and rows divided by length.

    With shared prompts, rows are also divided.
    """
    on_host, shared = request.param.startswith("host"), request.param.endswith("prompts shared")
    if not on_host:
        request.getfixturevalue("device_path")
    elif type(backend()) is Backend:
        pytest.skip("the host path is off, or the device is a GPU")
    else:
        monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SHARED_TOKENS", 1 if shared else 10**9)
    if shared or request.param.endswith("rows divided"):
        monkeypatch.setattr("clotho.inference.row_runs.MIN_UNEVEN_COLUMNS", 4)
        monkeypatch.setattr("clotho.inference.row_runs.MIN_RUN_BYTES", {"cpu": 1})
        if on_host:
            monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SAVED_SCORES", 4)
    monkeypatch.setattr("clotho.inference.cache_layout.MIN_SAVED_BYTES", {"cpu": 1 if shared else 10**9})
    if shared and model_lanes.current().dtype != "float32":
        pytest.skip("16-bit results are rounded in another order; see test_shared_prompts.py")


DECODED_ALONE: dict[tuple[object, ...], Completion] = {}


def alone(architecture: str, source: FixedSource, prompt: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
    """Complete one prompt alone. Tests of the same computation, with prompts shared or not, have one result."""
    key = (architecture, model_lanes.current().name, type(backend()), prompt, sampling, seed)
    if key not in DECODED_ALONE:
        DECODED_ALONE[key] = complete_alone(source, prompt, sampling, seed)
    return DECODED_ALONE[key]


LENGTHS = (1, 13, 30, 2, 21)


@pytest.mark.lanes("bfloat16", "4bit", engine_mode=ON_DEVICE, architecture=("gemma3_text", "qwen3_moe"))
@pairs(
    {
        "host": ("qwen3_moe", "qwen3_5"),
        "host, prompts shared": ("llama",),
        "host, rows divided": ("qwen3",),
        "MLX": tuple(ARCHITECTURES),
        "MLX, prompts shared": ("gemma3_text", "lfm2"),
        "MLX, rows divided": ("qwen3", "mamba2"),
    }
)
def test_greedy_rows_equal_the_reference_without_a_cache(architecture: str) -> None:
    """Rows of different lengths that join and leave at different times. Tokens and log-probabilities are equal."""
    source = tiny_source(architecture)
    engine = make_engine(source, prefill_chunk=16)
    submitted = []
    for i, length in enumerate(LENGTHS):
        sampling = Sampling(temperature=0.0, max_tokens=6 + 2 * i, ignore_eos=True)
        submitted.append(
            (make_prompt(length, i), sampling, submit_request(engine, make_prompt(length, i), sampling, (1, 2)))
        )
        engine.tick()
        engine.tick()
    run(engine)
    for prompt, sampling, answer in submitted:
        first, second = answer.completions
        assert first.tokens == second.tokens
        reference = reference_logprobs(source.model, prompt, first, sampling)
        for completion in answer.completions:
            np.testing.assert_allclose(completion.logprobs, reference, atol=model_lanes.atol(1e-4))


@pytest.mark.lanes("bfloat16", engine_mode=ON_DEVICE, architecture=("qwen3",))
@pytest.mark.needs_batch_invariance
@pairs(
    {
        "host": ("qwen3_moe", "qwen3_5"),
        "host, prompts shared": ("qwen3",),
        "host, rows divided": ("llama",),
        "MLX": ("qwen3", "gemma3_text", "mamba2"),
        "MLX, prompts shared": ("falcon_h1",),
        "MLX, rows divided": ("gemma3_text",),
    }
)
def test_sampled_rows_are_independent_of_their_neighbours(architecture: str) -> None:
    """Each completion equals the one sampled alone with the same seed. Its log-probabilities equal the reference."""
    source = tiny_source(architecture)
    engine = make_engine(source, max_num_seqs=5)
    submitted = []
    for i, length in enumerate(LENGTHS):
        sampling = Sampling(temperature=0.7 + 0.2 * i, max_tokens=5 + 3 * i, ignore_eos=True)
        submitted.append(
            (
                make_prompt(length, i),
                sampling,
                submit_request(engine, make_prompt(length, i), sampling, (10 * i, 10 * i + 1)),
            )
        )
        engine.tick()
    run(engine)
    for i, (prompt, sampling, answer) in enumerate(submitted):
        first, second = answer.completions
        assert first.tokens != second.tokens
        for completion, seed in ((first, 10 * i), (second, 10 * i + 1))[i % 2 :: 2]:
            assert completion.tokens == alone(architecture, source, prompt, sampling, seed).tokens
        reference = reference_logprobs(source.model, prompt, first, sampling)
        np.testing.assert_allclose(first.logprobs, reference, atol=model_lanes.atol(1e-4))


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

COUNTING = (
    Sampling(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, max_tokens=20, ignore_eos=True),
    Sampling(frequency_penalty=-0.8, logit_bias=((5, 4.0),), max_tokens=16, ignore_eos=True),
    Sampling(max_tokens=13, ignore_eos=True),
    Sampling(presence_penalty=-2.0, top_k=9, allowed_token_ids=tuple(range(40, 70)), max_tokens=18, ignore_eos=True),
    Sampling(min_tokens=9, logit_bias=((256, 20.0), (70, 20.0)), stop_token_ids=(70,), max_tokens=24),
    Sampling(allowed_token_ids=(3, 5, 8), bad_words=((3, 5), (8,), (5, 5, 5)), max_tokens=24, temperature=0.0),
    Sampling(bad_words=((80,),), logit_bias=((80, 5.0), (81, 4.0)), top_p=0.8, min_p=0.1, max_tokens=11),
)

ROWS = {"filters": slice(len(SETTINGS)), "counts": slice(len(SETTINGS), None), "all": slice(None)}


@pytest.mark.lanes("4bit", engine_mode=ON_DEVICE, rows=("counts",))
@pytest.mark.needs_batch_invariance
@pytest.mark.parametrize(
    ("engine_mode", "rows"),
    [
        *((mode, "all") for mode in ("host", "host, prompts shared", "MLX")),
        ("MLX", "counts"),
        ("MLX, prompts shared", "filters"),
    ],
    indirect=["engine_mode"],
)
def test_sampling_parameters_apply_per_row(rows: str) -> None:
    """Rows with all kinds of parameters in one batch sample as they do alone, with correct log-probabilities."""
    source = tiny_source()
    engine = make_engine(source)
    submitted = []
    for i, sampling in list(enumerate(SETTINGS + COUNTING))[ROWS[rows]]:
        submitted.append((i, sampling, submit_request(engine, make_prompt(5 + i, i), sampling, (i,))))
        engine.tick()
    run(engine)
    for i, sampling, answer in submitted:
        completion = answer.completions[0]
        assert completion.tokens == alone("qwen3", source, make_prompt(5 + i, i), sampling, i).tokens
        reference = reference_logprobs(source.model, make_prompt(5 + i, i), completion, sampling)
        np.testing.assert_allclose(completion.logprobs, reference, atol=model_lanes.atol(1e-4))


@pairs(
    {
        "host, rows divided": ("qwen3",),
        "MLX": ("gemma3_text",),
    }
)
def test_rows_longer_than_their_buffers_are_unchanged(architecture: str) -> None:
    """Buffers are replaced several times over 140 tokens, beside a short row."""
    source = tiny_source(architecture)
    engine = make_engine(source)
    long = Sampling(temperature=0.0, max_tokens=140, ignore_eos=True)
    answer = submit_request(engine, make_prompt(3), long)
    for i in range(14):
        submit_request(engine, make_prompt(40 + i, i), Sampling(max_tokens=9, ignore_eos=True), (i, i + 1))
        for _ in range(7):
            engine.tick()
    run(engine)
    reference_logprobs(source.model, make_prompt(3), answer.completions[0], long)


@pytest.mark.parametrize("engine_mode", ["host", "MLX"], indirect=True)
def test_equal_submissions_give_equal_batches() -> None:
    """The same requests in the same order give the same tokens, log-probabilities and number of ticks."""
    outcomes = []
    for _ in range(2):
        engine = make_engine(max_num_seqs=6)
        answers = [submit_request(engine, make_prompt(4 + i, i), seeds=(i, i + 50)) for i in range(7)]
        run(engine)
        stats = engine.stats()
        outcomes.append(([a.completions for a in answers], stats.decode_steps, stats.tokens_sampled))
    assert outcomes[0] == outcomes[1]
