"""The policy: weight swaps by pointer, and the reference policy."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from clotho.backend import backend
from clotho.models.parameters import Parameters, fingerprint, flat, nested
from clotho.models.policy import Policy
from clotho.models.policy_model import PolicyModel
from clotho.models.tokenizer import ChatTokenizer
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG, TOKENS_1_T, build

NO_TOKENIZER = cast(ChatTokenizer, None)


def make(config: dict[str, Any] = CONFIG, *, seed: int = 0, keep_reference: bool = False, **section: Any) -> Policy:
    """Return a policy of a random model. `section` has keys of [policy]."""
    return Policy(
        build(config), NO_TOKENIZER, policy_settings(**section), config=config, seed=seed, keep_reference=keep_reference
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
    backend().install_layers(model)
    result: mx.array = model(TOKENS_1_T)
    mx.eval(result)
    return result


def logits(policy: Policy | PolicyModel) -> mx.array:
    """Return the current logits for a fixed sequence."""
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


@pytest.mark.parametrize(
    ("section", "keeps"), [({}, True), ({"kind": "full"}, False), ({"train_embeddings": True}, False)]
)
def test_the_base_is_kept_if_only_an_adapter_is_trained(section: dict[str, Any], *, keeps: bool) -> None:
    """Else no other adapter's prefixes may outlive an update: their keys and values are those of the old base."""
    assert make(**section).keeps_base == keeps


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


def test_equal_seeds_give_equal_adapters_and_fingerprints() -> None:
    """The fingerprint is a function of the weights."""
    one, same_again, other = make(seed=7), make(seed=7), make(seed=8)
    assert one.fingerprint == same_again.fingerprint == fingerprint(one.trainable())
    assert one.fingerprint != other.fingerprint
    changed = flat(one.trainable())
    name = next(iter(changed))
    assert fingerprint(nested(changed | {name: changed[name] + 1e-6})) != one.fingerprint
    assert fingerprint(nested(changed | {name: changed[name].astype(mx.bfloat16)})) != one.fingerprint


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
