"""Routes of the sampler in a pass of the learner: other experts, with the weights of the learner's own scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import deepseek_v3, glm4_moe, kimi_linear
from numpy.typing import NDArray

from attachments.router_replay.routes import PassRoutes, can_replay, flipped, install_routes, routed
from clotho.models.experts import Mixtures
from protocols.errors import ModelError
from tests.small_models import tiny

REPLAYED = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe", "kimi_linear")


@pytest.fixture(autouse=True)
def routes_installed() -> None:
    """Load the modules of the models, and let their routers take routes."""
    for architecture in REPLAYED:
        tiny(architecture)
    install_routes()


def own_routes(model: Any, tokens_B_S: mx.array) -> mx.array:
    """Return the routes that the model itself chooses."""
    mixtures = Mixtures(model)
    with mixtures.recorded() as chosen:
        model(tokens_B_S)
    return mixtures.routes(chosen)


@pytest.mark.parametrize("architecture", REPLAYED)
def test_a_pass_takes_the_routes_of_the_sampler(architecture: str) -> None:
    """Its own give the same logits bit for bit; others change them, and tokens without a route choose themselves."""
    model = tiny(architecture)
    mixtures, tokens_B_S = Mixtures(model), mx.array([[3, 9, 4, 1], [7, 5, 2, 8]])
    assert can_replay(model, mixtures)
    logits, routes = model(tokens_B_S), own_routes(model, tokens_B_S)
    with routed(mixtures, PassRoutes(routes, None)) as one:
        assert mx.array_equal(model(tokens_B_S), logits).item()
    assert mx.array_equal(mixtures.routes(one.own), routes).item()
    others = (routes + 1) % 4
    with routed(mixtures, PassRoutes(others, None)):
        assert not mx.allclose(model(tokens_B_S), logits, atol=1e-3).item()
    with routed(mixtures, PassRoutes(others, mx.zeros((2, 4), dtype=mx.bool_))):
        assert mx.array_equal(model(tokens_B_S), logits).item()


def moe_output(
    x_T_D: NDArray[np.float64], block: Any, route_T_K: NDArray[np.int64], gate_E_D: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute a mixture of qwen3_moe in NumPy: softmax over all scores, then the shares of the given experts."""
    z_T_E = x_T_D @ gate_E_D.T
    share_T_E = np.exp(z_T_E - z_T_E.max(-1, keepdims=True))
    share_T_E /= share_T_E.sum(-1, keepdims=True)
    share_T_K = np.take_along_axis(share_T_E, route_T_K, -1)
    share_T_K /= share_T_K.sum(-1, keepdims=True)
    gate, up, down = (
        np.array(block.switch_mlp[name].weight, dtype=np.float64) for name in ("gate_proj", "up_proj", "down_proj")
    )
    y_T_D = np.zeros_like(x_T_D)
    for t, experts in enumerate(route_T_K):
        for k, e in enumerate(experts):
            g = gate[e] @ x_T_D[t]
            y_T_D[t] += share_T_K[t, k] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x_T_D[t])))
    return y_T_D


def test_replayed_experts_are_weighted_by_the_own_scores_which_get_the_gradient() -> None:
    """Against float64: the output, and the derivative of its sum with respect to a weight of the router."""
    model = tiny("qwen3_moe")
    block, mixtures = model.layers[0].mlp, Mixtures(model.layers[0])
    mixtures.per_token = [2]
    assert can_replay(model, Mixtures(model))
    width = block.gate.weight.shape[-1]
    x_1_T_D = mx.random.normal((1, 5, width), key=mx.random.key(3))
    route_T_K = np.array([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]])
    routes = PassRoutes(mx.array(route_T_K[None].astype(np.uint8)), None)

    def total(gate_E_D: mx.array) -> mx.array:
        block.gate.weight = gate_E_D
        with routed(mixtures, routes):
            output: mx.array = block(x_1_T_D)
        return mx.sum(output * mx.sin(mx.arange(width)))

    gate_E_D = block.gate.weight
    value, gradient_E_D = mx.value_and_grad(total)(gate_E_D)
    x_T_D, gate = np.array(x_1_T_D[0], dtype=np.float64), np.array(gate_E_D, dtype=np.float64)

    def oracle(gate: NDArray[np.float64]) -> float:
        return float((moe_output(x_T_D, block, route_T_K, gate) * np.sin(np.arange(width))).sum())

    block.gate.weight = gate_E_D
    assert float(value) == pytest.approx(oracle(gate), abs=1e-4)
    for e, d in ((0, 3), (3, 17), (2, 30)):
        step = np.zeros_like(gate)
        step[e, d] = 1e-5
        expected = (oracle(gate + step) - oracle(gate - step)) / 2e-5
        assert float(gradient_E_D[e, d]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("module", [deepseek_v3, glm4_moe])
def test_a_compiled_router_with_groups_takes_routes(module: Any) -> None:
    """Whether it was compiled before or not; outside a routed pass it is the compiled function as before."""
    install_routes()
    score_1_3_E = mx.random.normal((1, 3, 8), key=mx.random.key(0))
    arguments = score_1_3_E, mx.zeros(8), 2, 2, 1, 1.0, True
    own, share = module.group_expert_select(*arguments)
    mixtures: Any = SimpleNamespace(counts=[8], per_token=[2])
    others = (own + 1) % 8
    with routed(mixtures, PassRoutes(others.astype(mx.uint8), None)) as one:
        found, own_share = module.group_expert_select(*arguments)
    assert mx.array_equal(found, others).item()
    assert mx.array_equal(mx.sort(one.own[0]), mx.sort(own)).item()
    sigmoid = mx.take_along_axis(mx.sigmoid(score_1_3_E), others, axis=-1)
    assert mx.allclose(own_share, sigmoid / sigmoid.sum(-1, keepdims=True), atol=1e-6).item()
    assert mx.array_equal(module.group_expert_select(*arguments)[1], share).item()


def test_routers_that_choose_in_another_way_cannot_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled function would keep the routes of the pass that compiled it; the model computes as before."""
    model = tiny("kimi_linear")
    choose = kimi_linear._group_expert_select
    monkeypatch.setattr(kimi_linear, "_group_expert_select", mx.compile(lambda *arguments: choose(*arguments)))
    mixtures, tokens_B_S = Mixtures(model), mx.array([[3, 9, 4, 1]])
    logits = model(tokens_B_S)
    assert not can_replay(model, mixtures)
    assert mx.array_equal(model(tokens_B_S), logits).item()
    with pytest.raises(ModelError), routed(mixtures, PassRoutes(own_routes(model, tokens_B_S), None)):
        model(tokens_B_S)


def test_flips_count_experts_that_the_routes_lack() -> None:
    """By token and layer, whatever the order of the experts."""
    own_N_C, route_N_C = mx.array([[0, 1, 2], [3, 1, 0]]), mx.array([[1, 0, 2], [1, 2, 3]])
    assert flipped(own_N_C, route_N_C, [2, 1]).tolist() == [[0, 0], [1, 1]]


def test_routes_take_two_bytes_above_256_experts() -> None:
    """The numbers of up to 256 experts fit in one."""
    sizes = [Mixtures(tiny("qwen3_moe", num_experts=experts)).dtype for experts in (256, 257)]
    assert sizes == [mx.uint8, mx.uint16]
