"""The policy: swaps by pointer, steps aside for the reference, and always comes back."""

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
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG, MIXTURE, TOKENS_1_T, UNTIED, build

NO_TOKENIZER = cast(ChatTokenizer, None)


def make(config: dict[str, Any] = CONFIG, *, seed: int = 0, keep_reference: bool = False, **section: Any) -> Policy:
    """A policy over a random model; `section` holds keys of [policy]."""
    return Policy(
        build(config),
        NO_TOKENIZER,
        policy_settings(**section),
        config=config,
        seed=seed,
        keep_reference=keep_reference,
    )


def moved(parameters: Parameters, by: float = 0.05) -> Parameters:
    """Other evaluated parameters, as an update would make them."""
    tree: Parameters = tree_map(lambda array: array + by, parameters)
    mx.eval(tree)
    return tree


def base_logits(config: dict[str, Any] = CONFIG) -> mx.array:
    """Logits of the frozen base model with the CPU layers that a policy uses: a BLAS may round by memory layout."""
    model = build(config)
    model.freeze()
    install_cpu_layers(model)
    result: mx.array = model(TOKENS_1_T)
    mx.eval(result)
    return result


def logits(policy: Policy) -> mx.array:
    """What the policy computes now for a fixed sequence."""
    result: mx.array = policy.model(TOKENS_1_T)
    mx.eval(result)
    return result


def same(left: mx.array, right: mx.array) -> bool:
    """Bit for bit, NaN apart."""
    return bool(mx.array_equal(left, right).item())


def test_a_new_adapter_changes_nothing() -> None:
    """B starts at zero, so version 0 is the base policy, bit for bit."""
    base = base_logits()
    policy = make()
    assert same(logits(policy), base)
    assert (policy.version, policy.step) == (0, 0)


def test_publish_hands_over_the_very_arrays() -> None:
    """No copy: the model's parameters are the objects that were published."""
    policy = make()
    new = moved(policy.trainable())
    seconds = policy.publish(new, version=3, step=4, fingerprint="abc")
    inside, given = flat(policy.model.trainable_parameters()), flat(new)
    assert all(inside[name] is array for name, array in given.items())
    assert all(flat(policy.trainable())[name] is array for name, array in given.items())
    assert (policy.version, policy.step, policy.fingerprint) == (3, 4, "abc")
    assert 0 < seconds < 1


def test_publish_changes_what_the_model_computes() -> None:
    """The swap is seen by the next forward pass, and swapping back restores every bit."""
    policy = make()
    old, before = policy.trainable(), logits(policy)
    policy.publish(moved(old), version=1, step=1, fingerprint="")
    assert not same(logits(policy), before)
    policy.publish(old, version=2, step=2, fingerprint="")
    assert same(logits(policy), before)


def test_publish_copies_and_evaluates_nothing() -> None:
    """The model computes with the very arrays that were published, and arrays that are not evaluated stay so."""
    policy = make()
    published = flat(moved(policy.trainable()))
    name, unevaluated = next((name, array * 2.0) for name, array in published.items())
    published[name] = unevaluated
    held = mx.get_active_memory()
    policy.publish(nested(published), version=1, step=1, fingerprint="")
    assert mx.get_active_memory() <= held
    served, used = flat(policy.trainable()), flat(policy.model.trainable_parameters())
    assert all(served[name] is used[name] is array for name, array in published.items())


def test_publish_refuses_what_does_not_fit_and_changes_nothing() -> None:
    """A missing, extra, misshapen or mistyped parameter names itself; the served weights stay."""
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


def test_using_lends_the_model_and_takes_it_back() -> None:
    """Inside, the given parameters; after, the served ones; nested blocks unwind in order."""
    policy = make()
    first, second = moved(policy.trainable(), 0.05), moved(policy.trainable(), 0.1)
    served = logits(policy)
    with policy.using(first):
        of_first = logits(policy)
        with policy.using(second):
            assert not same(logits(policy), of_first)
        assert same(logits(policy), of_first)
    assert same(logits(policy), served)


def test_using_restores_after_an_error_and_after_tracers() -> None:
    """An exception, or a gradient that leaves tracers in the model, does no harm to what is served."""
    policy = make()
    before = logits(policy)
    with pytest.raises(ZeroDivisionError), policy.using(moved(policy.trainable())):
        raise ZeroDivisionError
    assert same(logits(policy), before)
    with policy.using(policy.trainable()):
        nn.value_and_grad(policy.model, lambda: policy.model(TOKENS_1_T).sum())()
    assert same(logits(policy), before)


def test_publishing_inside_using_takes_effect_after_it() -> None:
    """The lent parameters stay until the block ends; then the newly published ones serve."""
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
def test_the_reference_is_the_base_bit_for_bit(config: dict[str, Any], section: dict[str, Any]) -> None:
    """Far from its start, the policy's reference still computes what the untouched base does; then it is back."""
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


def test_initial_embeddings_and_head_are_kept_by_pointer_and_only_if_asked() -> None:
    """The reference computes with the very arrays of the base; an adapter alone needs none of it."""
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


def test_full_training_keeps_a_frozen_reference_only_if_asked() -> None:
    """Every floating parameter trains; the reference is the initial weights, or an error that says how to get them."""
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
    """The initial adapter is a function of the seed, and the fingerprint of the weights."""
    one, same_again, other = make(seed=7), make(seed=7), make(seed=8)
    assert one.fingerprint == same_again.fingerprint == fingerprint(one.trainable())
    assert one.fingerprint != other.fingerprint
    changed = flat(one.trainable())
    name = next(iter(changed))
    assert fingerprint(nested(changed | {name: changed[name] + 1e-6})) != one.fingerprint
    assert fingerprint(nested(changed | {name: changed[name].astype(mx.bfloat16)})) != one.fingerprint


def test_the_tree_of_parameters_matches_the_tree_of_gradients() -> None:
    """An optimizer maps both at once, empty branches included."""
    policy = make()
    gradients = nn.value_and_grad(policy.model, lambda: policy.model(TOKENS_1_T).sum())()[1]
    with policy.using(policy.trainable()):
        summed = tree_map(lambda gradient, parameter: gradient + parameter, gradients, policy.trainable())
    assert flat(summed).keys() == flat(policy.trainable()).keys()


def test_training_mode_draws_dropout_and_ends() -> None:
    """Dropout acts on gradients' forward passes only, never on what is served."""
    policy = make(dropout=0.5)
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="")
    served = logits(policy)
    with policy.training_mode():
        assert not same(logits(policy), served)
    assert same(logits(policy), served)


def test_gradient_checkpointing_gives_the_same_gradients_and_leaves_no_trace() -> None:
    """Blocks recompute inside training mode; the class that every other model shares is untouched."""
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


def test_the_description_tells_magnitudes_and_embeddings_from_the_base() -> None:
    """DoRA's magnitudes are the adapter's; trained embeddings stay the base's."""
    policy = make(kind="dora", rank=4, target_modules=("self_attn.q_proj",), train_embeddings=True)
    found = policy.description
    adapter = 2 * (4 * (64 + 64) + 64)
    assert found.trainable_parameters == adapter + 64 * 64
    assert found.parameters == sum(array.size for array in flat(build().parameters()).values())
    assert found.bytes == 4 * (found.parameters + adapter)


def test_the_description_counts_what_is_there() -> None:
    """Base and adapter are told apart; the numbers follow from the configuration."""
    policy = make(rank=4, target_modules=("self_attn.q_proj",))
    found = policy.description
    assert found.trainable_parameters == 2 * 4 * (64 + 64)
    assert found.parameters == sum(array.size for array in flat(build().parameters()).values())
    assert found.bytes == 4 * (found.parameters + found.trainable_parameters)
    assert (found.architecture, found.layers, found.hidden_size, found.vocab_size) == ("qwen3", 2, 64, 64)
    assert (found.dtype, found.quantization_bits, found.context_length) == ("float32", None, 128)
    assert (policy.vocab_size, policy.context_length) == (64, 128)
