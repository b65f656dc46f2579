"""The policy: weight swaps by pointer, and the reference policy."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map

from clotho.cpu.layers import install_cpu_layers
from clotho.models.parameters import fingerprint, flat, nested
from clotho.models.policy import Parameters, Policy
from clotho.models.tokenizer import ChatTokenizer
from tests import lanes
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG, MIXTURE, TOKENS_1_T, UNTIED, build

NO_TOKENIZER = cast(ChatTokenizer, None)


def make(config: dict[str, Any] = CONFIG, *, seed: int = 0, keep_reference: bool = False, **section: Any) -> Policy:
    """Return a policy of a random model. `section` has keys of [policy]."""
    return Policy(
        build(config),
        NO_TOKENIZER,
        policy_settings(**section),
        config=config,
        seed=seed,
        keep_reference=keep_reference,
    )


def moved(parameters: Parameters, by: float = 0.05) -> Parameters:
    """Return other evaluated parameters, as after an update."""
    tree: Parameters = tree_map(lambda array: array + by, parameters)
    mx.eval(tree)
    return tree


def base_logits(config: dict[str, Any] = CONFIG) -> mx.array:
    """Return logits of the frozen base model with the CPU layers of a policy."""
    model = build(config)
    model.freeze()
    install_cpu_layers(model)
    result: mx.array = model(TOKENS_1_T)
    mx.eval(result)
    return result


def logits(policy: Policy) -> mx.array:
    """Return the policy's current logits for a fixed sequence."""
    result: mx.array = policy.model(TOKENS_1_T)
    mx.eval(result)
    return result


def same(left: mx.array, right: mx.array) -> bool:
    """Compare bit for bit, except for NaN."""
    return bool(mx.array_equal(left, right).item())


def test_a_new_adapter_equals_the_base() -> None:
    """B is zero, so version 0 is the base policy, bit for bit."""
    base = base_logits()
    policy = make()
    assert same(logits(policy), base)
    assert (policy.version, policy.step) == (0, 0)


def test_publish_installs_the_given_arrays() -> None:
    """Without a copy: the model's parameters are the published objects."""
    policy = make()
    new = moved(policy.trainable())
    seconds = policy.publish(new, version=3, step=4, fingerprint="abc")
    inside, given = flat(policy.model.trainable_parameters()), flat(new)
    assert all(inside[name] is array for name, array in given.items())
    assert all(flat(policy.trainable())[name] is array for name, array in given.items())
    assert (policy.version, policy.step, policy.fingerprint) == (3, 4, "abc")
    assert 0 < seconds < 1


@pytest.mark.lanes
def test_publish_takes_effect_at_the_next_forward_pass() -> None:
    """Publishing the previous weights restores every bit."""
    policy = make()
    old, before = policy.trainable(), logits(policy)
    policy.publish(moved(old), version=1, step=1, fingerprint="")
    assert not same(logits(policy), before)
    policy.publish(old, version=2, step=2, fingerprint="")
    assert same(logits(policy), before)


@pytest.mark.needs_cpu_path
def test_publish_copies_and_evaluates_no_array() -> None:
    """Arrays that are not evaluated stay so. On the device path, a swap converts the adapter."""
    policy = make()
    published = flat(moved(policy.trainable()))
    name, unevaluated = next((name, array * 2.0) for name, array in published.items())
    published[name] = unevaluated
    held = mx.get_active_memory()
    policy.publish(nested(published), version=1, step=1, fingerprint="")
    assert mx.get_active_memory() <= held
    served, used = flat(policy.trainable()), flat(policy.model.trainable_parameters())
    assert all(served[name] is used[name] is array for name, array in published.items())


def test_a_thousand_weight_swaps_keep_the_memory_flat() -> None:
    """The replaced weights are released. Sampling between the swaps keeps none of them."""
    policy = make()
    held = 0
    for version in range(1, 1001):
        policy.publish(moved(policy.trainable(), 1e-4), version=version, step=version, fingerprint="")
        if version % 100 == 0:
            logits(policy)
            held = held or mx.get_active_memory()
    assert mx.get_active_memory() <= held


def test_publish_refuses_mismatched_parameters_without_a_change() -> None:
    """A missing, extra or misshapen parameter, or one of another type, is named. The served weights stay."""
    policy = make()
    good = flat(policy.trainable())
    name = "model.layers.1.mlp.up_proj.lora_b"
    faults = {
        "missing": {key: value for key, value in good.items() if key != name},
        "not trainable": good | {"model.norm.weight": mx.zeros((64,))},
        r"\(3, 3\)": good | {name: mx.zeros((3, 3))},
        "float16": good | {name: good[name].astype(mx.float16)},
    }
    before = logits(policy)
    for words, arrays in faults.items():
        with pytest.raises(ValueError, match=words):
            policy.publish(nested(arrays), version=9, step=9, fingerprint="")
    assert policy.version == 0
    assert same(logits(policy), before)


def test_using_installs_parameters_for_a_block() -> None:
    """The served parameters are restored afterwards, also for nested blocks."""
    policy = make()
    first, second = moved(policy.trainable(), 0.05), moved(policy.trainable(), 0.1)
    served = logits(policy)
    with policy.using(first):
        of_first = logits(policy)
        with policy.using(second):
            assert not same(logits(policy), of_first)
        assert same(logits(policy), of_first)
    assert same(logits(policy), served)


def test_using_restores_the_weights_after_an_error() -> None:
    """Also after a gradient that leaves tracers in the model."""
    policy = make()
    before = logits(policy)
    with pytest.raises(ZeroDivisionError), policy.using(moved(policy.trainable())):
        raise ZeroDivisionError
    assert same(logits(policy), before)
    with policy.using(policy.trainable()):
        nn.value_and_grad(policy.model, lambda: policy.model(TOKENS_1_T).sum())()
    assert same(logits(policy), before)


def test_publish_inside_using_takes_effect_after_the_block() -> None:
    """The temporary parameters stay until the block ends."""
    policy = make()
    pinned, newer = moved(policy.trainable(), 0.05), moved(policy.trainable(), 0.1)
    with policy.using(pinned):
        of_pinned = logits(policy)
        policy.publish(newer, version=1, step=1, fingerprint="")
        assert same(logits(policy), of_pinned)
    assert (
        flat(policy.model.trainable_parameters())["model.layers.0.mlp.up_proj.lora_a"]
        is (newer["model"]["layers"][0]["mlp"]["up_proj"]["lora_a"])
    )


@pytest.mark.parametrize(
    ("config", "section"),
    [
        (CONFIG, {}),
        (MIXTURE, {}),
        (CONFIG, {"kind": "dora"}),
        (CONFIG, {"train_embeddings": True}),
        (UNTIED, {"kind": "dora", "train_embeddings": True, "train_head": True}),
    ],
    ids=["dense", "mixture of experts", "dora", "tied embeddings", "dora, embeddings and head"],
)
def test_the_reference_policy_equals_the_base_bit_for_bit(config: dict[str, Any], section: dict[str, Any]) -> None:
    """Also after many updates. The policy is restored afterwards."""
    if "train_embeddings" in section:
        lanes.skip_quantized()
    base = base_logits(config)
    policy = make(config, keep_reference=True, **section)
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="")
    trained = logits(policy)
    assert not same(trained, base)
    with policy.reference():
        assert same(logits(policy), base)
    assert same(logits(policy), trained)
    with pytest.raises(ZeroDivisionError), policy.reference():
        raise ZeroDivisionError
    assert same(logits(policy), trained)
    with policy.using(moved(policy.trainable(), 0.2)):
        of_lent = logits(policy)
        with policy.reference():
            assert same(logits(policy), base)
        assert same(logits(policy), of_lent)
    assert same(logits(policy), trained)


def test_initial_embeddings_and_head_are_kept_only_if_required() -> None:
    """The reference policy uses the arrays of the base. An adapter alone needs no copy."""
    lanes.skip_quantized()
    model = build(UNTIED)
    initial = (model.model.embed_tokens.weight, model.lm_head.weight)
    section = policy_settings(train_embeddings=True, train_head=True)
    policy = Policy(model, NO_TOKENIZER, section, config=UNTIED, seed=0, keep_reference=True)
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="")
    with policy.reference():
        assert model.model.embed_tokens.weight is initial[0]
        assert model.lm_head.weight is initial[1]
    with pytest.raises(ValueError, match="keep_reference"), make(UNTIED, train_head=True).reference():
        pass
    with make().reference():
        pass


def test_full_training_keeps_a_frozen_reference_only_if_required() -> None:
    """Every floating-point parameter is trainable. Without the copy, the error says how to keep it."""
    lanes.skip_full_training("full")
    policy = make(kind="full", keep_reference=True)
    base = logits(policy)
    assert flat(policy.trainable()).keys() == flat(policy.model.parameters()).keys()
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="")
    trained = logits(policy)
    with policy.reference():
        assert same(logits(policy), base)
    assert same(logits(policy), trained)
    with pytest.raises(ValueError, match="keep_reference"), make(kind="full").reference():
        pass


def test_equal_seeds_give_equal_adapters_and_fingerprints() -> None:
    """The fingerprint is a function of the weights."""
    one, same_again, other = make(seed=7), make(seed=7), make(seed=8)
    assert one.fingerprint == same_again.fingerprint == fingerprint(one.trainable())
    assert one.fingerprint != other.fingerprint
    changed = flat(one.trainable())
    name = next(iter(changed))
    assert fingerprint(nested(changed | {name: changed[name] + 1e-6})) != one.fingerprint
    assert fingerprint(nested(changed | {name: changed[name].astype(mx.bfloat16)})) != one.fingerprint


def test_the_parameter_tree_matches_the_gradient_tree() -> None:
    """An optimizer maps over both, empty branches included."""
    policy = make()
    gradients = nn.value_and_grad(policy.model, lambda: policy.model(TOKENS_1_T).sum())()[1]
    with policy.using(policy.trainable()):
        summed = tree_map(lambda gradient, parameter: gradient + parameter, gradients, policy.trainable())
    assert flat(summed).keys() == flat(policy.trainable()).keys()


def test_training_mode_applies_dropout_inside_its_context() -> None:
    """Served forward passes have no dropout."""
    policy = make(dropout=0.5)
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="")
    served = logits(policy)
    with policy.training_mode():
        assert not same(logits(policy), served)
    assert same(logits(policy), served)


def test_gradient_checkpointing_gives_equal_gradients() -> None:
    """Blocks are recomputed in training mode only. The class of other models does not change."""
    plain, saving = make(seed=3), make(seed=3, grad_checkpoint=True)
    block = type(saving.model.layers[0])
    of_block = block.__call__
    gradients = []
    for policy in (plain, saving):
        with policy.using(moved(policy.trainable())), policy.training_mode():
            kind = type(policy.model.layers[0])
            gradients.append(flat(nn.value_and_grad(policy.model, lambda p=policy: p.model(TOKENS_1_T).sum())()[1]))
        assert (kind is block) == (policy is plain)
    assert all(mx.allclose(array, gradients[1][name], rtol=1e-5).item() for name, array in gradients[0].items())
    assert type(saving.model.layers[0]) is block
    assert block.__call__ is of_block


@pytest.mark.needs_float32
def test_the_description_separates_magnitudes_and_embeddings() -> None:
    """DoRA's magnitudes count to the adapter, trained embeddings to the base."""
    policy = make(kind="dora", rank=4, target_modules=("self_attn.q_proj",), train_embeddings=True)
    found = policy.description
    adapter = 2 * (4 * (64 + 64) + 64)
    assert found.trainable_parameters == adapter + 64 * 64
    assert found.parameters == sum(array.size for array in flat(build().parameters()).values())
    assert found.bytes == 4 * (found.parameters + adapter)


@pytest.mark.needs_float32
def test_the_description_counts_base_and_adapter_parameters() -> None:
    """The numbers follow from the configuration."""
    policy = make(rank=4, target_modules=("self_attn.q_proj",))
    found = policy.description
    assert found.trainable_parameters == 2 * 4 * (64 + 64)
    assert found.parameters == sum(array.size for array in flat(build().parameters()).values())
    assert found.bytes == 4 * (found.parameters + found.trainable_parameters)
    assert (found.architecture, found.layers, found.hidden_size, found.vocab_size) == ("qwen3", 2, 64, 64)
    assert (found.dtype, found.quantization_bits, found.context_length) == ("float32", None, 128)
    assert (policy.vocab_size, policy.context_length) == (64, 128)
