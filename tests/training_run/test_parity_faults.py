"""Parity checks with emulated split-K products: rounding passes, and faults are found, in every type.

The check runs on the path of devices, whose products differ between decode steps and whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from clotho.backend import Backend, backend
from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import Policy
from protocols.sampling import Sampling
from tests.inference.engine_helpers import run, submit_request
from tests.split_k import split_k
from tests.training.policies_and_groups import learner, scored_group
from tests.training_run.checked_parity import checked
from tests.training_run.parity_noise import (
    PRECISIONS,
    SHAPE,
    deep_policy,
    embedded_policy,
    engine_of,
    random_sample,
    reports,
)
from training_run.parity_check import LIMITS, MAX_ROWS, SERVED_KL, ParityReport

pytestmark = [pytest.mark.usefixtures("device_path"), pytest.mark.needs_float32]

Arrays = dict[str, mx.array]

FAST = (("float32", 0), ("bfloat16", 4))
ALL_PRECISIONS = [
    pytest.param(dtype, bits, marks=() if (dtype, bits) in FAST else pytest.mark.slow) for dtype, bits in PRECISIONS
]
FAULT_PRECISIONS = [
    pytest.param(dtype, bits, marks=() if (dtype, bits) == FAST[0] else pytest.mark.slow) for dtype, bits in PRECISIONS
]


def test_this_module_computes_on_the_device_path() -> None:
    """As a GPU does."""
    assert type(backend()) is Backend


def passes(report: ParityReport, dtype: str) -> bool:
    """Whether the broadcaster continues, without a warning."""
    limits = LIMITS[dtype]
    stops = not (report.mean_kl <= limits.stop_kl and report.served_kl <= SERVED_KL)
    return not stops and report.max_difference <= limits.warn_nats


@pytest.mark.parametrize(("dtype", "bits"), ALL_PRECISIONS)
def test_rounding_passes(dtype: str, bits: int) -> None:
    """Three layers. Sampler and learner differ in 16 bits, and a third of the limit is not reached."""
    (report,) = reports(dtype, bits, layers=3, probes=1)
    assert report.tokens == 32
    assert passes(report, dtype)
    assert report.mean_kl < LIMITS[dtype].stop_kl / 3
    assert (report.mean_kl > 1e-7) == (dtype != "float32")


def scaled(arrays: Arrays, _: Arrays) -> Arrays:
    """The adapters, as if their scale were 10 % larger."""
    return {name: array * 1.1 if "lora_b" in name else array for name, array in arrays.items()}


def stale(arrays: Arrays, previous: Arrays) -> Arrays:
    """The adapters, those of one layer from the previous version."""
    return {name: previous[name] if ".layers.1." in name else array for name, array in arrays.items()}


def exchanged(arrays: Arrays, _: Arrays) -> Arrays:
    """The adapters, the B matrices of keys and values of one layer exchanged."""
    key, value = (f"model.layers.1.self_attn.{name}_proj.lora_b" for name in "kv")
    return arrays | {key: arrays[value], value: arrays[key]}


def noisy(arrays: Arrays, _: Arrays) -> Arrays:
    """The adapters, with noise of 1e-2 in the queries of one attention head."""
    name = "model.layers.2.self_attn.q_proj.lora_b"
    noise = 1e-2 * mx.random.normal(arrays[name].shape, key=mx.random.key(3))
    head = mx.arange(arrays[name].shape[-1]) < SHAPE["head_dim"]
    return arrays | {name: arrays[name] + mx.where(head, noise, 0.0)}


def serve(policy: Policy, arrays: Arrays) -> None:
    """Serve these adapters. The learner has others."""
    policy.publish(nested(arrays), version=2, step=2, fingerprint="")


def convert(policy: Policy, arrays: Arrays) -> None:
    """Convert these adapters to 16 bits for the served ones, as a faulty conversion would."""
    for group in policy._served._folded.groups:
        correct = group.fold(flat(policy.trainable()))
        group.serve(group.fold(arrays)._replace(lora_a=correct.lora_a, lora_b=correct.lora_b))


@pytest.mark.parametrize(("dtype", "bits"), FAULT_PRECISIONS)
@pytest.mark.parametrize(
    ("fault", "place"),
    [(scaled, serve), (stale, serve), (exchanged, serve), (noisy, serve), (noisy, convert), (stale, convert)],
)
def test_wrong_served_weights_are_found(
    dtype: str, bits: int, fault: Callable[[Arrays, Arrays], Arrays], place: Callable[[Policy, Arrays], None]
) -> None:
    """By the first check, although rounding in 16 bits is larger than the effect. The previous version is 1e-3 away."""
    policy = deep_policy(dtype, bits, layers=3)
    previous = flat(policy.trainable())
    mx.random.seed(5)
    moved = {name: array + 1e-3 * mx.sign(mx.random.normal(array.shape)) for name, array in previous.items()}
    mx.eval(moved)
    serve(policy, moved)
    assert check(policy, nested(moved)).served_kl == 0.0
    place(policy, fault(moved, previous))
    report = check(policy, nested(moved))
    assert report.served_kl > 10 * SERVED_KL
    assert not passes(report, dtype)


@pytest.mark.parametrize(("dtype", "bits"), FAULT_PRECISIONS)
def test_an_exchanged_base_array_is_found(dtype: str, bits: int) -> None:
    """The served model has the output projections of two layers exchanged; other models have their own modules."""
    policy = deep_policy(dtype, bits, layers=3)
    assert check(policy, policy.trainable()).served_kl == 0.0
    first, second = (policy.model.layers[i].self_attn.o_proj.linear for i in (0, 1))
    first["weight"], second["weight"] = second["weight"], first["weight"]
    report = check(policy, policy.trainable())
    assert report.served_kl > SERVED_KL
    assert not passes(report, dtype)


def test_a_wrong_conversion_of_one_layer_is_found_among_rounding() -> None:
    """In four bits, where the rounding of the base model is largest."""
    test_wrong_served_weights_are_found("bfloat16", 4, stale, convert)


def check(policy: Policy, parameters: Parameters) -> ParityReport:
    """Check once, with split-K products. parameters: of the learner."""
    sample = random_sample(policy.vocab_size)
    with split_k():
        return checked(policy, engine_of(policy), sample, rows=MAX_ROWS, layout="auto", parameters=parameters)


@pytest.mark.parametrize(("dtype", "bits"), FAULT_PRECISIONS)
@pytest.mark.parametrize("space", [False, True])
def test_a_space_in_the_prompt_is_found(dtype: str, bits: int, *, space: bool) -> None:
    """The mismatch of the first update compares the recorded log-probabilities with those for the learner's prompt."""
    policy = embedded_policy(dtype, bits)
    policy.version = 0
    engine, groups = engine_of(policy), []
    with split_k():
        for number, question in enumerate(("What is 12 + 7?", "Which is larger? A) 4 B) 9")):
            prompt = policy.tokenizer.render_chat([{"role": "user", "content": question}])
            sampled = (*prompt, *policy.tokenizer.encode(" ")) if space else prompt
            answer = submit_request(engine, sampled, Sampling(max_tokens=8, ignore_eos=True), tuple(range(16)))
            run(engine)
            group = scored_group([[1]], [0.0], prompt=prompt, group_id=number)
            completions = tuple(answer.completions)
            rewards = tuple(float(value) for value in np.arange(len(completions)) % 2)
            groups.append(replace(group, group=replace(group.group, completions=completions), rewards=rewards))
    mismatch = learner(policy).update(groups).metrics.mismatch_kl
    assert (mismatch > 2 * LIMITS[dtype].stop_kl) if space else (mismatch < LIMITS[dtype].stop_kl / 3)


def swaps(dtype: str, bits: int, *, layers: int, count: int) -> None:
    """Check after every swap of random adapters; at the rows of a running batch, with split-K products."""
    for report in reports(dtype, bits, layers=layers, probes=count):
        assert passes(report, dtype), report


@pytest.mark.parametrize("bits", [0, 4])
def test_swaps_pass_without_a_warning(bits: int) -> None:
    """Two swaps of four layers in bfloat16."""
    swaps("bfloat16", bits, layers=4, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0, 4])
def test_200_swaps_of_28_layers_pass_without_a_warning(bits: int) -> None:
    """In bfloat16, with head size 64 and groups of 64."""
    swaps("bfloat16", bits, layers=28, count=200)
