"""Layers with the gated delta rule on the host: a row has a state of fixed size, which moves and leaves with it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from attachments.cpu.backend import HostPrompts
from attachments.cpu.decoder import HostDecoder
from attachments.cpu.delta_layer import DeltaLayer
from attachments.cpu.tests.supported_models import adapt, host_rows, plain_source
from clotho.inference.rows import PromptState
from tests.inference.cache_rows import Rows
from tests.inference.engine_helpers import make_prompt

pytestmark = pytest.mark.needs_cpu_path


def check_state(found: PromptState, rows: Rows, tokens: tuple[int, ...]) -> None:
    """Compare a state with that of the model after these tokens."""
    for layer, expected in zip(found, rows.layout.prefilled(tokens) or (), strict=True):
        for one, other in zip(layer, expected, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-4)


def test_rows_take_their_states_along() -> None:
    """When slots are reordered, removed, appended and reused: a new row begins without the state of the last one."""
    rows = host_rows(plain_source("qwen3_5").model, 4)
    for slot in range(4):
        rows.enter([slot], make_prompt(9 + slot, slot))
    rows.check_step()
    rows.take([3, 0, 2])
    rows.check_step()
    rows.cache.grow(1)
    rows.tokens, rows.live_B = [*rows.tokens, (0,)], np.append(rows.live_B, False)
    rows.enter([3], make_prompt(7, 5))
    rows.enter([1], make_prompt(1, 6))
    rows.check_step()
    for slot, tokens in enumerate(rows.tokens):
        check_state(rows.cache.state(slot, len(tokens) - 1), rows, tokens[:-1])


def test_states_that_are_not_finite_do_not_outlive_their_row() -> None:
    """A cleared slot has zeros in all of its arrays."""
    rows = host_rows(plain_source("qwen3_5").model, 2)
    rows.enter([0], make_prompt(9))
    for held in rows.cache._states.layers[0]:
        held[1] = np.nan
    rows.cache.clear(1)
    assert not any(held[1].any() for held in rows.cache._states.layers[0])
    rows.check_step()


@pytest.mark.parametrize("restored", [False, True])
def test_prompts_are_prefilled_token_by_token_and_a_pass_can_begin_again(restored: bool) -> None:
    """Two prompts of 20 tokens, from their first or tenth token; the second pass is dropped after its first block."""
    model = plain_source("qwen3_5").model
    adapt(model)
    rows, done, length = host_rows(model, 1), 9 if restored else 0, 20
    prompts, tokens = HostPrompts(HostDecoder(model), 2, length), [make_prompt(length, salt) for salt in range(2)]
    for row in range(2 if restored else 0):
        prompts.restore(row, rows.layout.prefilled(tokens[row][:done]) or (), done)
    token_B_T = np.array(tokens, dtype=np.int32)
    for start in range(done, length, 7):
        dropped = prompts.parts(token_B_T[:, start : start + 7], start)
        for _ in range(3):
            next(dropped)
        for _ in prompts.parts(token_B_T[:, start : start + 7], start):
            pass
    for row in range(2):
        check_state(prompts.state(row, length), rows, tokens[row])


def test_a_step_costs_as_much_after_many_tokens_as_after_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a layer keeps of a row and allocates in a step do not depend on the number of tokens."""
    costs: list[tuple[int, int]] = []
    usual = DeltaLayer.__call__

    def measured(self: DeltaLayer, step: Any, cache: Any) -> None:
        tracemalloc.start()
        usual(self, step, cache)
        costs.append((sum(held.nbytes for held in cache), tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()

    rows = host_rows(plain_source("qwen3_5").model, 1)
    for length in (3, 400):
        rows.enter([0], make_prompt(length))
        rows.step()  # its buffers are made
        monkeypatch.setattr(DeltaLayer, "__call__", measured)
        rows.check_step()
        monkeypatch.setattr(DeltaLayer, "__call__", usual)
    (kept, allocated), (kept_of_long, allocated_of_long) = costs
    assert kept == kept_of_long
    assert abs(allocated - allocated_of_long) < 1024


def test_heads_of_values_that_share_a_key_and_a_shorter_convolution_are_the_models() -> None:
    """Sizes of keys and values that differ, four heads of values to one of keys, and a window of two tokens."""
    sizes = {"linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
    rows = host_rows(plain_source("qwen3_5", linear_conv_kernel_dim=2, **sizes).model, 2)
    rows.enter([0], make_prompt(20))
    rows.enter([1], make_prompt(1, 1))
    rows.check_step()
    rows.check_step()
