"""Adapters are loaded, replaced and unloaded, and the policy is swapped, while rows run."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from attachments.adapters.tests.adapter_models import engine_with_adapters, write_mlx_adapter
from bench.contenders.shapes import Shape, configuration, random_model
from bench.shapes import make_policy
from clotho.inference.engine import DecodeEngine
from clotho.models.policy import Policy
from clotho.settings.engine import EngineSection
from clotho.settings.model import Dora, FullMethod, Lora, PolicySection
from clotho.settings.server import AdaptersSection
from protocols.errors import RequestError
from protocols.sampling import BASE, POLICY, Completion, SampleRequest, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import GREEDY, make_prompt, run, submit_request, tick_until
from tests.small_models import tiny, tiny_source
from training_run.forced_decoder import ForcedDecoder

LONG = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPT = make_prompt(9)


def two_versions(root: Path) -> tuple[Path, Path]:
    """Write two adapters with different results."""
    model = tiny("qwen3", vocab_size=257)
    return write_mlx_adapter(root / "old", model, rank=4, seed=1), write_mlx_adapter(root / "new", model, seed=2)


def alone(path: Path, sampling: Sampling = LONG) -> Completion:
    """Return the completion of an adapter in an engine of its own."""
    engine, _ = engine_with_adapters(tiny_source(), {"a": path})
    answer = submit_request(engine, PROMPT, sampling, weights="a")
    run(engine)
    return answer.completions[0]


def test_a_response_uses_one_version_of_its_adapter(tmp_path: Path) -> None:
    """A reload during a response affects later requests only, and both report the version that sampled."""
    old, new = two_versions(tmp_path)
    engine, adapters = engine_with_adapters(tiny_source(), {"a": old})
    before = submit_request(engine, PROMPT, LONG, weights="a")
    tick_until(engine, lambda: engine.running == 1)
    adapters.load_adapter("a", adapters.store.read(new), replace=True)
    after = submit_request(engine, PROMPT, LONG, weights="a")
    run(engine)
    first, second = before.completions[0], after.completions[0]
    assert first.tokens == alone(old).tokens
    assert second.tokens == alone(new).tokens
    assert len(set(first.versions)) == len(set(second.versions)) == 1
    assert second.versions[0] > first.versions[0]
    assert first.fingerprint != second.fingerprint


def test_the_policy_recompute_moves_running_rows_to_the_new_version(tmp_path: Path) -> None:
    """Their KV caches are computed again, so that the continuation is that of the new version."""
    old, new = two_versions(tmp_path)
    engine, adapters = engine_with_adapters(tiny_source(), {"a": old}, kv_policy="recompute")
    answer = submit_request(engine, PROMPT, LONG, weights="a")
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 5)
    adapters.load_adapter("a", adapters.store.read(new), replace=True)
    run(engine)
    completion = answer.completions[0]
    changed = completion.versions.index(max(completion.versions))
    assert 0 < changed < len(completion.tokens)
    engine, _ = engine_with_adapters(tiny_source(), {"a": new})
    rest = Sampling(temperature=0.0, max_tokens=LONG.max_tokens - changed, ignore_eos=True)
    continued = submit_request(engine, (*PROMPT, *completion.tokens[:changed]), rest, weights="a")
    run(engine)
    assert continued.completions[0].tokens == completion.tokens[changed:]


@pytest.mark.parametrize("on_host", [pytest.param(True, marks=pytest.mark.needs_cpu_path), False])
def test_replaced_versions_leave_no_memory(tmp_path: Path, request: pytest.FixtureRequest, *, on_host: bool) -> None:
    """Neither their matrices nor what prompts and decode steps computed from them, without a garbage collection."""
    if not on_host:
        request.getfixturevalue("device_path")
    old, new = two_versions(tmp_path)
    engine, adapters = engine_with_adapters(tiny_source(), {"a": old})
    contents = adapters.store.read(new)

    def reload_and_sample(times: int) -> int:
        for _ in range(times):
            adapters.load_adapter("a", contents, replace=True)
            submit_request(engine, PROMPT, GREEDY, weights="a")
            submit_request(engine, PROMPT, GREEDY, weights=BASE)
            run(engine)
        return mx.get_active_memory()

    gc.collect()  # of the tests before
    gc.disable()
    try:
        before = reload_and_sample(3)
        assert reload_and_sample(8) - before < 2 * contents.bytes
    finally:
        gc.enable()


def test_rows_of_an_unloaded_adapter_finish(tmp_path: Path) -> None:
    """The name is unknown for later requests."""
    old, _ = two_versions(tmp_path)
    engine, adapters = engine_with_adapters(tiny_source(), {"a": old})
    answer = submit_request(engine, PROMPT, LONG, weights="a")
    tick_until(engine, lambda: engine.running == 1)
    adapters.unload_adapter("a")
    with pytest.raises(RequestError) as error:
        submit_request(engine, PROMPT, LONG, weights="a")
    assert error.value.param == "model"
    run(engine)
    assert answer.completions[0].tokens == alone(old).tokens


def test_prefixes_of_other_weights_are_never_used(tmp_path: Path) -> None:
    """The prefix cache is keyed by the weights; a new version of an adapter has none."""
    old, new = two_versions(tmp_path)
    engine, adapters = engine_with_adapters(tiny_source(), {"a": old, "b": new})
    for weights in ("a", POLICY, "b", BASE):
        submit_request(engine, PROMPT, GREEDY, weights=weights, reuse_prefix=True)
        run(engine)
    assert engine.stats().prefix_hits == 0
    submit_request(engine, PROMPT, GREEDY, weights="a", reuse_prefix=True)
    run(engine)
    assert engine.stats().prefix_hits == 1
    adapters.load_adapter("a", adapters.store.read(new), replace=True)
    answer = submit_request(engine, PROMPT, GREEDY, weights="a", reuse_prefix=True)
    run(engine)
    assert engine.stats().prefix_hits == 1
    assert answer.completions[0].tokens == alone(new, GREEDY).tokens


def test_teacher_forced_logits_are_those_of_the_named_weights(tmp_path: Path) -> None:
    """The greedy completion of an adapter has the highest logit at every position."""
    old, _ = two_versions(tmp_path)
    engine, _ = engine_with_adapters(tiny_source(), {"a": old})
    for weights in ("a", BASE):
        answer = submit_request(engine, PROMPT, GREEDY, weights=weights)
        run(engine)
        tokens = answer.completions[0].tokens
        steps = ForcedDecoder.of_engine(engine).teacher_forced_logits(
            PROMPT, [tokens], rows=2, adapter=engine.row_weights.admit(weights)
        )
        logits = [model_lanes.numpy(one) for one in steps]
        assert [int(one[1].argmax()) for one in logits] == list(tokens)


SHAPE = Shape(layers=2, width=64, heads=2, key_heads=1, feed_forward=64, vocabulary=64)


def moved_policy(section: PolicySection) -> Policy:
    """Return a policy whose trained weights differ from the base model."""
    policy = make_policy(random_model(SHAPE), configuration(SHAPE), section=section)
    moved = tree_map(lambda array: array + 0.05, policy.trainable())
    policy.publish(moved, version=1, step=1, fingerprint="1")
    return policy


def engine_of(policy: Policy, **settings: object) -> DecodeEngine:
    """Return an engine over a policy, with adapters."""
    return DecodeEngine(policy, EngineSection(**settings), AdaptersSection())  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [Lora(), Dora()], ids=["lora", "dora"])
def test_rows_of_the_policy_and_of_the_base_model_share_a_batch(method: Lora | Dora) -> None:
    """The base model is the model before training; a policy with DoRA is computed beside it."""
    policy = moved_policy(PolicySection(method=method))
    engine = engine_of(policy)
    answers = {weights: submit_request(engine, (3, 1, 4), GREEDY, weights=weights) for weights in (BASE, POLICY)}
    run(engine)
    for weights, answer in answers.items():
        single = engine_of(policy)
        expected = submit_request(single, (3, 1, 4), GREEDY, weights=weights)
        run(single)
        assert answer.completions[0].tokens == expected.completions[0].tokens
    plain = DecodeEngine(make_policy(random_model(SHAPE), configuration(SHAPE)), EngineSection())
    expected = submit_request(plain, (3, 1, 4), GREEDY)
    run(plain)
    assert answers[BASE].completions[0].tokens == expected.completions[0].tokens
    assert set(answers[BASE].completions[0].versions) == {0}
    assert set(answers[POLICY].completions[0].versions) == {1}


@pytest.mark.parametrize("kv_policy", ["keep", "recompute", "drain"])
def test_a_weight_swap_of_the_policy_does_not_touch_rows_of_the_base_model(kv_policy: str) -> None:
    """Their log-probabilities are those of a run without a swap; rows of the policy continue with the new version."""
    policy = moved_policy(PolicySection(method=Lora()))
    engine = engine_of(policy)
    base = submit_request(engine, (3, 1, 4), LONG, weights=BASE)
    trained = submit_request(engine, (3, 1, 4), LONG) if kv_policy != "drain" else None
    tick_until(engine, lambda: engine.stats().tokens_sampled >= 8)
    assert engine.policy_rows == (kv_policy != "drain")
    running = engine.running
    policy.publish(tree_map(lambda array: array * 1.5, policy.trainable()), version=2, step=2, fingerprint="2")
    engine.weights_changed(kv_policy)  # type: ignore[arg-type]
    assert engine.running == running - (kv_policy == "recompute")
    run(engine)
    undisturbed = engine_of(moved_policy(PolicySection(method=Lora())))
    expected = submit_request(undisturbed, (3, 1, 4), LONG, weights=BASE)
    run(undisturbed)
    assert base.completions[0].tokens == expected.completions[0].tokens
    difference = np.array(base.completions[0].logprobs) - np.array(expected.completions[0].logprobs)
    assert np.abs(difference).max() < 1e-4
    if trained is not None:
        assert set(trained.completions[0].versions) == {1, 2}


def test_the_base_model_is_not_served_if_the_policy_trains_its_weights() -> None:
    """There are no weights of the base model to compute with."""
    engine = engine_of(moved_policy(PolicySection(method=FullMethod())))
    with pytest.raises(RequestError) as error:
        engine.submit(SampleRequest(prompt=(1,), sampling=GREEDY, seeds=(1,), weights=BASE), lambda _: None)
    assert error.value.param == "model"


def test_an_engine_without_adapters_samples_from_the_policy_only() -> None:
    """Evaluations use such an engine."""
    engine = DecodeEngine(tiny_source(), EngineSection())
    with pytest.raises(RequestError) as error:
        submit_request(engine, PROMPT, GREEDY, weights=BASE)
    assert error.value.param == "model"
