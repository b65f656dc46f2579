"""What the engine measures about requests and steps."""

from __future__ import annotations

from clotho.inference.outputs import BOUNDS, Timings
from protocols.sampling import Sampling
from tests.inference.engine_helpers import make_engine, make_prompt, run, submit_request

SAMPLING = Sampling(max_tokens=6, ignore_eos=True)
OF_REQUESTS = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")


def test_every_request_of_a_client_is_measured_once() -> None:
    """Its completions share one time in the queue, of prefill and of decoding; rollouts are not measured."""
    engine = make_engine()
    submit_request(engine, make_prompt(4), SAMPLING, seeds=(1, 2, 3))
    submit_request(engine, make_prompt(5), SAMPLING)
    submit_request(engine, make_prompt(6), SAMPLING, background=True)
    run(engine)
    timings = engine.stats().timings
    assert timings.keys() == BOUNDS.keys()
    assert {name: sum(timings[name].counts) for name in OF_REQUESTS} == dict.fromkeys(OF_REQUESTS, 2)
    assert all(timings[name].total >= 0 for name in OF_REQUESTS)


def test_every_token_is_measured_once() -> None:
    """A step counts with all its tokens. The first token of a batch has no predecessor."""
    engine = make_engine()
    submit_request(engine, make_prompt(4), SAMPLING, seeds=(1, 2))
    run(engine)
    steps = engine.stats().timings["iteration_tokens_total"]
    assert steps.total == 12 == engine.stats().tokens_sampled
    assert sum(engine.stats().timings["inter_token_latency_seconds"].counts) == 10


def test_a_pause_without_rows_is_no_latency() -> None:
    """The first step after an idle engine follows no other. A row counts once per step, whatever tokens it samples."""
    timings, batch = Timings(), object()
    timings.step(batch, 2, 2, more=True)
    timings.step(batch, 2, 6, more=False)
    timings.step(batch, 5, 5, more=True)
    assert sum(timings.distributions()["inter_token_latency_seconds"].counts) == 2
    assert timings.distributions()["iteration_tokens_total"].total == 13
