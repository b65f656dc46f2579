"""`DecodeEngine.swap`: the weights of the policy change between two steps, and running rows follow `kv_policy`."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.adapters.tests.adapter_models import engine_with_adapters, write_mlx_adapter
from clotho.settings.engine import KvPolicy
from protocols.sampling import Sampling
from tests import model_lanes
from tests.inference.engine_helpers import make_engine, make_prompt, run, submit_request, tick_until
from tests.small_models import FixedSource, tiny, tiny_source

LONG = Sampling(max_tokens=20, ignore_eos=True)
PROMPT = make_prompt(9)


class Published:
    """Publishes other weights of a source as its next version."""

    def __init__(self, source: FixedSource) -> None:
        self.source = source

    def __call__(self) -> float:
        """Return a duration in seconds."""
        self.source.model.update(model_lanes.scaled(self.source.model.parameters(), 1.3))
        self.source.version += 1
        return 0.25


@pytest.mark.parametrize("kv_policy", ["keep", "recompute", "drain"])
def test_a_swap_without_running_rows_happens_at_once(kv_policy: KvPolicy) -> None:
    """The future has the result of `publish`, and the next request samples from the new version."""
    source = tiny_source()
    engine = make_engine(source)
    assert engine.swap(Published(source), kv_policy).result(0) == 0.25
    answer = submit_request(engine, PROMPT, LONG)
    run(engine)
    assert set(answer.completions[0].versions) == {1}


def test_a_drain_waits_for_the_rows_of_the_policy_and_admits_none() -> None:
    """A waiting request samples from the new version alone. The engine has work as long as the swap waits."""
    source = tiny_source()
    engine = make_engine(source)
    early = submit_request(engine, PROMPT, LONG)
    tick_until(engine, lambda: engine.running == 1)
    swapped = engine.swap(Published(source), "drain")
    late = submit_request(engine, make_prompt(5, 1), LONG)
    while not swapped.done():
        assert engine.has_work
        assert engine.running <= 1
        engine.tick()
    assert swapped.result(0) == 0.25
    run(engine)
    assert set(early.completions[0].versions) == {0}
    assert set(late.completions[0].versions) == {1}


def test_a_drain_does_not_wait_for_rows_of_adapters(tmp_path: Path) -> None:
    """They go on before, during and after the swap, with their own version."""
    path = write_mlx_adapter(tmp_path / "a", tiny("qwen3", vocab_size=257), rank=4, seed=1)
    source = tiny_source()
    engine, _ = engine_with_adapters(source, {"a": path})
    adapted = submit_request(engine, PROMPT, Sampling(max_tokens=60, ignore_eos=True), weights="a")
    policy = submit_request(engine, PROMPT, LONG)
    tick_until(engine, lambda: engine.running == 2)
    swapped = engine.swap(lambda: 0.25, "drain")
    tick_until(engine, swapped.done)
    assert policy.completions
    assert not adapted.completions
    run(engine)
    (completion,) = adapted.completions
    assert (len(completion.tokens), len(set(completion.versions))) == (60, 1)


def test_a_cancelled_drain_admits_again() -> None:
    """Before the running rows end, and without a swap."""
    source = tiny_source()
    engine = make_engine(source)
    early = submit_request(engine, PROMPT, Sampling(max_tokens=60, ignore_eos=True))
    tick_until(engine, lambda: engine.running == 1)
    swapped = engine.swap(Published(source), "drain")
    late = submit_request(engine, make_prompt(5, 1), LONG)
    engine.tick()
    assert swapped.cancel()
    tick_until(engine, lambda: bool(late.completions))
    assert not early.completions
    run(engine)
    assert source.version == 0
    assert not engine.has_work


@pytest.mark.parametrize("kv_policy", ["keep", "recompute", "drain"])
def test_a_swap_that_fails_changes_nothing(kv_policy: KvPolicy) -> None:
    """The future has the exception, and decoding goes on with the version of before."""

    def fail() -> float:
        raise ValueError("other shapes")

    engine = make_engine()
    answer = submit_request(engine, PROMPT, LONG)
    tick_until(engine, lambda: engine.running == 1)
    swapped = engine.swap(fail, kv_policy)
    late = submit_request(engine, PROMPT, LONG)
    run(engine)
    assert isinstance(swapped.exception(0), ValueError)
    assert set(answer.completions[0].versions) | set(late.completions[0].versions) == {0}


def test_a_drain_ends_when_all_requests_fail() -> None:
    """An engine that starts afresh serves the new weights."""
    source = tiny_source()
    engine = make_engine(source)
    submit_request(engine, PROMPT, LONG)
    tick_until(engine, lambda: engine.running == 1)
    swapped = engine.swap(Published(source), "drain")
    engine.fail_all("by the test")
    run(engine)
    assert swapped.done()
    assert source.version == 1
