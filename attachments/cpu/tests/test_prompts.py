"""Prompts of clients are prefilled on the host: as by the model, and without a graph of MLX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attachments.cpu.backend import HostPrompts
from attachments.cpu.decoder import HostDecoder
from attachments.cpu.tests.supported_models import PLAIN, adapt, plain_source
from clotho.inference.cache_layout import CacheLayout
from clotho.models.turns import TurnBudget
from protocols.sampling import Sampling
from tests import model_lanes
from tests.inference.engine_helpers import complete_alone, make_engine, make_prompt, run, submit_request
from tests.small_models import tiny_source

pytestmark = pytest.mark.needs_cpu_path

SHORT = Sampling(max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("architecture", [*PLAIN, "qwen3_moe"])
def test_the_kv_caches_of_prompts_are_those_of_the_model(architecture: str, restored: bool) -> None:
    """Of a padded and of a longer prompt, in passes of seven tokens, and from the first tokens of a longer state."""
    model = plain_source(architecture).model
    adapt(model)
    layout, lengths, done = CacheLayout(model), (20, 17), 9 if restored else 0
    expected = [layout.prefilled(make_prompt(length, length)) for length in lengths]
    prompts, token_B_T = HostPrompts(HostDecoder(model), 2, 20), np.zeros((2, 20), dtype=np.int32)
    for row, length in enumerate(lengths):
        token_B_T[row, :length] = make_prompt(length, length)
        if done:
            prompts.restore(row, expected[row] or (), done)
    for start in range(done, 20, 7):
        for _ in prompts.parts(token_B_T[:, start : start + 7], start):
            pass
    for row, length in enumerate(lengths):
        for layer, model_layer in zip(prompts.state(row, length), expected[row] or (), strict=True):
            for found, array in zip(layer, model_layer, strict=True):
                assert found.shape == array.shape
                np.testing.assert_allclose(np.array(found), np.array(array), atol=1e-4)


def test_a_prompt_of_a_client_is_no_forward_pass_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the rest of one whose beginning is in the prefix cache. The rollouts of a run are prefilled by MLX."""
    source = tiny_source()
    engine, prompt = make_engine(source), make_prompt(30)
    expected = [complete_alone(source, one, SHORT).tokens for one in (prompt, (*prompt[:20], 3, 4), prompt[:12])]

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("a forward pass")

    monkeypatch.setattr(type(source.model), "__call__", refuse)
    for one, tokens in zip((prompt, (*prompt[:20], 3, 4), prompt[:12]), expected, strict=True):
        answer = submit_request(engine, one, SHORT, reuse_prefix=True)
        run(engine)
        assert answer.completions[0].tokens == tokens
    assert (engine.stats().prefix_hits, engine.stats().prefill_tokens) == (2, 29 + 1)
    rollout = submit_request(engine, prompt, SHORT, background=True)
    run(engine)
    assert "a forward pass" in rollout.failures[0]


def test_a_pass_has_a_limited_number_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows, heads and columns; one token per prompt at least."""
    source = tiny_source()
    decoder, expected = HostDecoder(source.model), complete_alone(source, make_prompt(40), SHORT).tokens
    heads, _, repeats, _ = decoder.query_shape(1)
    monkeypatch.setattr("attachments.cpu.backend.MAX_SCORES", 12 * heads * repeats * 40)
    assert HostPrompts(decoder, 3, 40).most(40) == 4
    assert HostPrompts(decoder, 13, 40).most(40) == 1
    engine = make_engine(source)
    answer = submit_request(engine, make_prompt(40), SHORT)
    ticks = 0
    while not engine.running:
        engine.tick()
        ticks += 1
    assert ticks == 4  # 39 tokens, 12 per pass
    run(engine)
    assert answer.completions[0].tokens == expected


def test_a_pass_in_progress_begins_again_after_a_swap() -> None:
    """Its blocks have the weights of one version."""
    source = tiny_source(num_hidden_layers=6)
    engine, prompt = make_engine(source, turns=TurnBudget(1e-12)), make_prompt(9)
    answer = submit_request(engine, prompt, SHORT)
    for _ in range(3):
        engine.tick()
    assert engine._prefill.client_is_interrupted
    source.model.update(model_lanes.scaled(source.model.parameters(), 1.3))
    source.version += 1
    engine.weights_changed("keep")
    run(engine)
    assert answer.completions[0].tokens == complete_alone(source, prompt, SHORT).tokens


def test_a_failed_pass_fails_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request submitted together with it completes."""
    engine, parts = make_engine(), HostPrompts.parts

    def refuse_long(self: HostPrompts, token_B_T: Any, start: int) -> Any:
        if token_B_T.shape[1] > 12:
            raise RuntimeError("out of memory")
        return parts(self, token_B_T, start)

    monkeypatch.setattr(HostPrompts, "parts", refuse_long)
    bad, good = submit_request(engine, make_prompt(60), SHORT, (1, 2)), submit_request(engine, make_prompt(5), SHORT)
    run(engine)
    assert "out of memory" in bad.failures[0]
    assert len(good.completions[0].tokens) == 6


def test_rows_that_join_one_by_one_find_room() -> None:
    """Buffers that a row has made larger have room for more rows."""
    engine = make_engine()
    submit_request(engine, make_prompt(8), Sampling(max_tokens=60, ignore_eos=True), tuple(range(16)))
    found = []
    for salt in range(3):
        while engine.running < 16 + salt:
            engine.tick()
        cache: Any = engine._short.batch._cache
        found.append((cache._columns[0][0].shape[1], cache._columns[0][0].__array_interface__["data"][0]))
        submit_request(engine, make_prompt(6, salt), Sampling(max_tokens=60, ignore_eos=True))
    assert found[0][0] == 16
    assert found[1] == found[2]
