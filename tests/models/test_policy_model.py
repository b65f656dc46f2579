"""Models of the policy for components that compute at the same time: copies of the modules over the same arrays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import Policy
from clotho.models.policy_model import PolicyModel
from tests import model_lanes
from tests.learner_settings import policy_settings
from tests.models.test_policy import NO_TOKENIZER, base_logits, logits, make, moved, same
from tests.saved_models import CONFIG, MIXTURE, TOKENS_1_T, UNTIED, build
from tests.scoring.layouts.reference_scores import policy_of as policy_of_architecture
from tests.small_models import ARCHITECTURES

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied head": (CONFIG, {}),
    "untied head": (UNTIED, {}),
    "mixture of experts": (MIXTURE, {}),
    "dora": (CONFIG, {"kind": "dora"}),
    "tied embeddings": (CONFIG, {"train_embeddings": True}),
    "dora, embeddings and head": (UNTIED, {"kind": "dora", "train_embeddings": True, "train_head": True}),
    "full": (CONFIG, {"kind": "full"}),
    "dropout and checkpointed blocks": (CONFIG, {"dropout": 0.5, "grad_checkpoint": True}),
}
"""Configuration of a base model, and keys of [policy]."""

FOLDED = ("tied head", "mixture of experts", "dora, embeddings and head")
"""Kinds whose layers differ on the device path."""


def places(*further: tuple[str, int], but: str = "") -> pytest.MarkDecorator:
    """Compute with all kinds on the host and with some on the device; further: kinds and bits on both paths."""
    plain = [(kind, 0) for kind in KINDS if kind != but]
    rows = [("host", *one) for one in (*plain, *further)]
    rows += [("device", *one) for one in (*((kind, 0) for kind in FOLDED), *further)]
    return pytest.mark.parametrize(("any_path", "kind", "bits"), rows, indirect=["any_path"])


def policy_of(kind: str, *, bits: int = 0) -> Policy:
    """Return a policy of a kind with parameters that have moved. bits: of the base; 0 = not quantized."""
    config, section = KINDS[kind]
    model_lanes.skip_full_training(section.get("kind", "lora"))
    if "train_embeddings" in section:
        model_lanes.skip_quantized()
    if not bits:
        policy = make(config, keep_reference=True, **section)
    else:
        model = build(config)
        nn.quantize(model, group_size=32, bits=bits)
        settings = policy_settings(**section)
        policy = Policy(model, NO_TOKENIZER, settings, config=config, seed=0, keep_reference=True)
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="moved")
    return policy


@pytest.fixture(params=["host", "device"])
def any_path(request: pytest.FixtureRequest) -> None:
    """Compute with the kernels of the host, and with folded adapters, as on a GPU."""
    if request.param == "device":
        request.getfixturevalue("device_path")


def arrays_of(model: nn.Module) -> dict[str, mx.array]:
    """Return all arrays of a model, frozen ones included."""
    return flat(model.parameters())


def gradient(model: PolicyModel, parameters: Parameters) -> dict[str, mx.array]:
    """Return the gradient of a scalar that depends on all logits; the model has `parameters` afterwards."""

    def loss(traced: Parameters) -> mx.array:
        model.use(traced)
        return mx.mean(mx.square(cast(mx.array, model.model(TOKENS_1_T)).astype(mx.float32)))

    with model.training_mode():
        arrays = flat(mx.grad(loss)(nested(flat(parameters))))
    model.use(parameters)
    mx.eval(arrays)
    return arrays


def array_memory() -> int:
    """Return the bytes of all arrays. The thread of a stream drops those of its last operation after `eval` returns."""
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


@pytest.mark.usefixtures("any_path")
@places(("tied head", 4), ("dora", 4), ("untied head", 8))
def test_a_copy_computes_the_same_bits_with_the_same_arrays(kind: str, bits: int) -> None:
    """Every array of the copy is the object of the original, tied or not, quantized or not, in other modules.

    So copies take no memory of arrays.
    """
    policy = policy_of(kind, bits=bits)
    served = logits(policy)
    mx.synchronize()
    held = mx.get_active_memory()
    copied, *others = (policy.copy_model() for _ in range(3))
    assert mx.get_active_memory() <= held, f"memory of {len(others)} further copies"
    original = arrays_of(policy.model)
    assert arrays_of(copied.model).keys() == original.keys()
    assert all(array is original[name] for name, array in arrays_of(copied.model).items())
    assert not {id(one) for one in copied.model.modules()} & {id(one) for one in policy.model.modules()}
    assert same(logits(copied), served)


@pytest.mark.usefixtures("any_path")
@places(("dora", 4))
def test_computing_with_a_copy_does_not_change_what_the_policy_computes(kind: str, bits: int) -> None:
    """Neither other parameters, nor the reference policy, nor a gradient, nor training mode."""
    policy = policy_of(kind, bits=bits)
    served, copied = logits(policy), policy.copy_model()
    other = moved(policy.trainable(), 0.2)
    copied.use(other)
    assert not same(logits(copied), served)
    assert same(logits(policy), served)
    copied.use_reference()
    assert not same(logits(copied), served)
    assert same(logits(policy), served)
    gradient(copied, other)
    assert same(logits(policy), served)
    with copied.training_mode():
        assert not any(module.training for module in policy.model.modules())
        assert same(logits(policy), served)


@pytest.mark.usefixtures("any_path", "no_buffer_cache")
@pytest.mark.parametrize(
    ("any_path", "kind"),
    [("host", "full"), ("host", "dora, embeddings and head"), *(("device", kind) for kind in FOLDED)],
    indirect=["any_path"],
)
def test_replaced_parameters_are_freed(kind: str) -> None:
    """A policy and a released copy keep none of them, whatever part of the weights is trained."""
    config, section = KINDS[kind]
    model_lanes.skip_full_training(section.get("kind", "lora"))
    policy = make(config, **section)
    copied = policy.copy_model()
    copied.use(moved(policy.trainable()))
    copied.fold()
    copied.release()
    held = array_memory()
    for version in (1, 2):
        policy.publish(moved(policy.trainable()), version=version, step=version, fingerprint="")
    assert array_memory() <= held
    copied.use(policy.trainable())
    assert same(logits(copied), logits(policy))


def test_publishing_does_not_change_what_a_copy_computes() -> None:
    """A copy keeps its parameters until `use`. A later copy has the served ones."""
    policy = policy_of("tied head")
    copied = policy.copy_model()
    before = logits(copied)
    policy.publish(moved(policy.trainable()), version=2, step=2, fingerprint="2")
    assert same(logits(copied), before)
    assert not same(logits(policy), before)
    assert same(logits(policy.copy_model()), logits(policy))


@pytest.mark.usefixtures("any_path")
def test_use_computes_with_the_given_arrays() -> None:
    """Without a copy: the parameters of the model are the given objects, and a policy that serves them agrees."""
    policy = policy_of("tied head")
    copied, new = policy.copy_model(), moved(policy.trainable(), 0.1)
    copied.use(new)
    given = flat(new)
    assert all(array is given[name] for name, array in flat(copied.model.trainable_parameters()).items())
    assert all(array is given[name] for name, array in flat(copied.trainable()).items())
    policy.publish(new, version=2, step=2, fingerprint="2")
    assert same(logits(copied), logits(policy))


@pytest.mark.parametrize("as_reference", [False, True])
def test_use_refuses_other_trees_without_a_change(*, as_reference: bool) -> None:
    """A missing, extra or misshapen parameter, or one of another type, is named."""
    policy = policy_of("tied head")
    model = policy.copy_model()
    if as_reference:
        model.use_reference()
    good = flat(policy.trainable())
    name = "model.layers.1.mlp.up_proj.lora_b"
    faults = {
        "missing": {key: value for key, value in good.items() if key != name},
        "not trainable": good | {"model.norm.weight": mx.zeros((64,))},
        r"\(3, 3\)": good | {name: mx.zeros((3, 3))},
        "float16": good | {name: good[name].astype(mx.float16)},
    }
    before, used = logits(model), flat(model.trainable())
    for words, arrays in faults.items():
        with pytest.raises(ValueError, match=words):
            model.use(nested(arrays))
        assert same(logits(model), before)
        assert all(flat(model.trainable())[name] is array for name, array in used.items())


@pytest.mark.usefixtures("any_path")
@places(but="full")
def test_the_reference_policy_equals_the_base_bit_for_bit(kind: str, bits: int) -> None:
    """Also after updates. `use` returns to the adapter."""
    policy = policy_of(kind, bits=bits)
    model = policy.copy_model()
    trained, base = logits(model), base_logits(KINDS[kind][0])
    assert not same(trained, base)
    for _ in range(2):
        model.use_reference()
        model.use_reference()
        assert same(logits(model), base)
        assert same(logits(policy), trained)
        model.use(policy.trainable())
        assert same(logits(model), trained)


def test_a_copy_of_a_model_that_computes_as_the_reference_does_so_too() -> None:
    """And returns to the adapter by itself."""
    policy = policy_of("dora")
    model = policy.copy_model()
    model.use_reference()
    copied = model.copy()
    assert same(logits(copied), logits(model))
    copied.use(policy.trainable())
    assert same(logits(copied), logits(policy))
    assert not same(logits(copied), logits(model))


def test_initial_embeddings_and_head_are_kept_only_if_required() -> None:
    """The reference policy uses the arrays of the base. An adapter alone needs no copy."""
    model_lanes.skip_quantized()
    base = build(UNTIED)
    initial = (base.model.embed_tokens.weight, base.lm_head.weight)
    section = policy_settings(train_embeddings=True, train_head=True)
    policy = Policy(base, NO_TOKENIZER, section, config=UNTIED, seed=0, keep_reference=True)
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="")
    model = policy.copy_model()
    model.use_reference()
    modules: Any = model.model
    assert modules.model.embed_tokens.weight is initial[0]
    assert modules.lm_head.weight is initial[1]
    with pytest.raises(ValueError, match="keep_reference"):
        make(UNTIED, train_head=True).copy_model().use_reference()
    make().copy_model().use_reference()


def test_full_training_keeps_a_frozen_reference_only_if_required() -> None:
    """Every floating-point parameter is trainable. Without the copy, the error says how to keep it."""
    model_lanes.skip_full_training("full")
    policy = make(kind="full", keep_reference=True)
    base = logits(policy)
    assert flat(policy.trainable()).keys() == flat(policy.model.parameters()).keys()
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="")
    trained, model = logits(policy), policy.copy_model()
    model.use_reference()
    assert same(logits(model), base)
    model.use(policy.trainable())
    assert same(logits(model), trained)
    without = make(kind="full").copy_model()
    with pytest.raises(ValueError, match="keep_reference"):
        without.use_reference()
    assert same(logits(without), base)


@pytest.mark.usefixtures("any_path")
@pytest.mark.parametrize("kind", ["mixture of experts", "dora"])
def test_two_threads_compute_at_the_same_time_what_they_compute_alone(kind: str) -> None:
    """Decode steps of one version, and gradients of another, bit for bit."""
    policy = policy_of(kind)
    other = moved(policy.trainable(), 0.1)
    start = Barrier(2)

    def decode(model: PolicyModel) -> list[bytes]:
        return [model_lanes.numpy(logits(model)).tobytes() for _ in range(12)]

    def learn(model: PolicyModel) -> list[bytes]:
        found = [gradient(model, other) for _ in range(6)]
        return [b"".join(np.array(array).tobytes() for array in arrays.values()) for arrays in found]

    def together(work: Callable[[PolicyModel], list[bytes]]) -> list[bytes]:
        model = policy.copy_model()
        start.wait()
        return work(model)

    alone = decode(policy.copy_model()), learn(policy.copy_model())
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(together, work) for work in (decode, learn)]
        assert tuple(future.result() for future in futures) == alone
    assert len(set(alone[0])) == len(set(alone[1])) == 1


def test_the_parameter_tree_matches_the_gradient_tree() -> None:
    """An optimizer maps over both, empty branches included."""
    policy = make()
    model = policy.copy_model()
    gradients = nn.value_and_grad(model.model, lambda: model.model(TOKENS_1_T).sum())()[1]
    summed = tree_map(lambda one, parameter: one + parameter, gradients, policy.trainable())
    assert flat(summed).keys() == flat(policy.trainable()).keys()


def test_training_mode_applies_dropout_inside_its_context() -> None:
    """Outside of it forward passes have no dropout, also after an exception."""
    policy = make(dropout=0.5)
    policy.publish(moved(policy.trainable()), version=1, step=1, fingerprint="")
    model = policy.copy_model()
    served = logits(model)
    with model.training_mode():
        assert not same(logits(model), served)
    assert same(logits(model), served)
    with pytest.raises(ZeroDivisionError), model.training_mode():
        raise ZeroDivisionError
    assert same(logits(model), served)


def test_gradient_checkpointing_gives_equal_gradients() -> None:
    """Blocks are recomputed in training mode only. The class of other models does not change."""
    plain, saving = make(seed=3), make(seed=3, grad_checkpoint=True)
    block = type(saving.model.layers[0])
    of_block = block.__call__
    gradients = []
    for policy in (plain, saving):
        model = policy.copy_model()
        with model.training_mode():
            kind = type(cast(Any, model.model).layers[0])
        assert (kind is block) == (policy is plain)
        gradients.append(gradient(model, moved(policy.trainable())))
        assert type(cast(Any, model.model).layers[0]) is block
    assert all(mx.allclose(array, gradients[1][name], rtol=1e-5).item() for name, array in gradients[0].items())
    assert type(saving.model.layers[0]) is block
    assert block.__call__ is of_block


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_copies_of_every_architecture_are_independent(architecture: str) -> None:
    """Recurrent, hybrid and sliding-window models too: no module of the copy refers to a module of the policy."""
    policy = policy_of_architecture(architecture)
    served, copied = logits(policy), policy.copy_model()
    other = moved(policy.trainable(), 0.1)
    copied.use(other)
    ahead = logits(copied)
    assert same(logits(policy), served)
    assert not same(ahead, served)
    policy.publish(other, version=2, step=2, fingerprint="2")
    assert same(logits(policy), ahead)
    frozen = arrays_of(policy.model)
    assert all(array is frozen[name] for name, array in arrays_of(copied.model).items())
