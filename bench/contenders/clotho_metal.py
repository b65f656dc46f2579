"""Clotho on the models of `metal`: decode steps, updates, weight swaps, parity and determinism, on the device path."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from bench.contenders.measured_turns import MeasuredTurns
from bench.contenders.metal_model import (
    RANK,
    SCALE,
    WARM_UP,
    counted_configuration,
    first_token_metrics,
    measure_steps,
    metal_configuration,
    packed_model,
    random_adapter,
)
from bench.contenders.scored_groups import groups
from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import random_prompts
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from bench.graph_counts import decode_step
from bench.shapes import make_policy
from clotho.inference.engine import DecodeEngine
from clotho.models.parameters import flat, nested
from clotho.models.policy import Policy
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.learner import LearnerSection
from clotho.settings.model import Lora, PolicySection
from clotho.training.update import PolicyLearner
from protocols.sampling import Completion, CompletionDone, SampleEvent, SampleRequest, Sampling
from training_run.parity_check import ParityChecker, parity_sample

SECTION = PolicySection(method=Lora(rank=RANK, scale=SCALE), grad_checkpoint=True)

PARITY_COMPLETIONS = 8
"""Maximum number of completions of a parity check; with more rows, rows repeat them."""


def adapted(config: dict[str, Any]) -> Policy:
    """The policy with the same adapter as mlx-lm's model."""
    policy = make_policy(packed_model(config), config, section=SECTION)
    arrays = {name: random_adapter(array.shape, name) for name, array in flat(policy.trainable()).items()}
    mx.eval(arrays)
    policy.publish(nested(arrays), version=1, step=1, fingerprint="random")
    return policy


@lru_cache(maxsize=1)
def _policy(name: str) -> Policy:
    return adapted(metal_configuration(name))


def _engine(policy: Policy, *, rows: int) -> DecodeEngine:
    return DecodeEngine(policy, EngineSection(max_num_seqs=rows, prefix_cache_tokens=0))


def _requests(case: Case, policy: Policy, *, tokens: int) -> list[SampleRequest]:
    """One request per prompt, with as many completions as the case has rows."""
    group = min(case["rows"], case["group"])
    prompts = random_prompts(case["rows"] // group, case["prompt_tokens"], policy.vocab_size)
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return [
        SampleRequest(prompt=tuple(prompt), sampling=sampling, seeds=tuple(range(at * group, (at + 1) * group)))
        for at, prompt in enumerate(prompts)
    ]


def decode(case: Case) -> Metrics:
    """Decode steps of all rows together, without their prefill."""
    policy = _policy(case["model"])
    engine = _engine(policy, rows=case["rows"])
    for request in _requests(case, policy, tokens=case["steps"] + WARM_UP + 8):
        engine.submit(request, lambda _: None)
    while engine.running < case["rows"]:
        engine.tick()
    return measure_steps(engine.tick, rows=case["rows"], steps=case["steps"], seconds=case["seconds"])


def first_token(case: Case) -> Metrics:
    """From the request of one completion to its first token, on an idle engine."""
    policy = _policy(case["model"])
    engine = _engine(policy, rows=1)
    (prompt,) = random_prompts(1, case["prompt_tokens"], policy.vocab_size)

    def once() -> float:
        events: list[SampleEvent] = []
        sampling = Sampling(max_tokens=16, ignore_eos=True)
        began = time.perf_counter()
        asked = engine.submit(
            SampleRequest(prompt=tuple(prompt), sampling=sampling, seeds=(0,), stream=True), events.append
        )
        while engine.has_work and not events:
            engine.tick()
        seconds = time.perf_counter() - began
        engine.abort(asked)
        while engine.has_work:
            engine.tick()
        return seconds

    return first_token_metrics(once, seconds=case["seconds"])


def precision(case: Case) -> Metrics:
    """The relative error of a product of float32 matrices: about 1e-7 in float32, and 1e-4 in TF32."""
    numbers = np.random.default_rng(0)
    a, b = (numbers.standard_normal((case["size"], case["size"])).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    found = np.array(mx.array(a) @ mx.array(b), dtype=np.float64)
    return {"float32_error": float(np.linalg.norm(found - exact) / np.linalg.norm(exact))}


def graph(case: Case) -> Metrics:
    """Operations of a decode step, on a narrow model of the same depth."""
    counts = decode_step(adapted(counted_configuration(case["model"])), rows=case["rows"])
    return {"nodes": counts.nodes, "kernels": counts.kernels}


def update(case: Case) -> Metrics:
    """The same update twice, from the same weights. The first one measures how long parts of a turn take.

    partial: 1 if the time was over before the second one ended; its metrics are then those of the turns that it had.
    """
    policy = _policy(case["model"])
    sampling = SamplingSection(max_tokens=case["completion_tokens"])
    settings = LearnerSection(micro_batch_tokens=case["micro_batch_tokens"])
    batch = groups(case | {"vocabulary": policy.vocab_size})
    turns = MeasuredTurns()
    learner = PolicyLearner(policy, settings, sampling, steps=1, lane=turns)
    initial = learner.state()
    mx.reset_peak_memory()
    first = last = turns.run(lambda: learner.update(batch), limit=case["seconds"] / 2)
    if first is not None:
        learner.restore(initial)
        mx.reset_peak_memory()
        last = turns.run(lambda: learner.update(batch), limit=case["seconds"] - turns.seconds)
    equal = {} if first is None or last is None else {"updates_equal": float(first.fingerprint == last.fingerprint)}
    return {
        "seconds": turns.seconds,
        "turns": turns.number,
        "longest_turn_seconds": turns.longest,
        "peak_bytes": mx.get_peak_memory(),
        "partial": float(last is None),
        **equal,
    }


def swap(case: Case) -> Metrics:
    """Weight swaps between two decode steps; two sets of weights alternate."""
    policy = _policy(case["model"])
    served = policy.trainable()
    versions = [nested({name: array + 0.0 for name, array in flat(served).items()}), served]
    mx.eval(versions)
    engine = _engine(policy, rows=case["rows"])
    limit = time.perf_counter() + case["seconds"]
    for request in _requests(case, policy, tokens=case["swaps"] + 8):
        engine.submit(request, lambda _: None)
    while engine.running < case["rows"]:
        engine.tick()
    seconds: list[float] = []
    while not seconds or (len(seconds) < case["swaps"] and time.perf_counter() < limit):
        began = time.perf_counter()
        policy.publish(versions[len(seconds) % 2], version=1, step=1, fingerprint="random")
        engine.weights_changed("keep")
        seconds.append(time.perf_counter() - began)
        engine.tick()
    policy.publish(served, version=1, step=1, fingerprint="random")
    partial = float(len(seconds) < case["swaps"])
    return {"swap_seconds": statistics.median(seconds), "longest_swap_seconds": max(seconds), "partial": partial}


def parity(case: Case) -> Metrics:
    """The parity check of a run with this number of rows, on tokens of the policy. RuntimeError if the time is over."""
    policy = _policy(case["model"])
    prompt, completions = _sampled(case["model"], case["prompt_tokens"], case["tokens"])
    sample = parity_sample(prompt, completions[: case["rows"]], tokens=case["tokens"])
    lane, settings = MeasuredTurns(), EngineSection(max_num_seqs=case["rows"], prefix_cache_tokens=0)
    checker = ParityChecker(
        policy,
        DecodeEngine(policy, settings),
        settings=settings,
        learner=LearnerSection(),
        decode=_at_once,
        lane=lane,
    )
    parameters = policy.trainable()
    report = lane.run(lambda: checker.check(sample, parameters, temperature=1.0), limit=case["seconds"])
    if report is None:
        raise RuntimeError(f"no parity check within {case['seconds']:.0f} s")
    return {"mean_kl": report.mean_kl, "largest_nats": report.max_difference, "served_kl": report.served_kl}


def _at_once(call: Callable[[], Any]) -> Future[Any]:
    """Run a call in this thread, which is also that of the engine."""
    future: Future[Any] = Future()
    future.set_result(call())
    return future


def _sample(policy: Policy, requests: list[SampleRequest]) -> list[Completion]:
    """Complete the requests in a new engine."""
    engine = _engine(policy, rows=sum(len(request.seeds) for request in requests))
    ended: list[SampleEvent] = []
    for request in requests:
        engine.submit(request, ended.append)
    while engine.has_work:
        engine.tick()
    return [event.completion for event in ended if isinstance(event, CompletionDone)]


@lru_cache(maxsize=1)
def _sampled(model: str, prompt_tokens: int, tokens: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A prompt of random tokens, and completions that the policy samples."""
    policy = _policy(model)
    rows = {"rows": PARITY_COMPLETIONS, "group": PARITY_COMPLETIONS, "prompt_tokens": prompt_tokens}
    (request,) = _requests(rows, policy, tokens=tokens)
    return request.prompt, [completion.tokens for completion in _sample(policy, [request])]


def determinism(case: Case) -> Metrics:
    """Whether the same requests with the same seeds give the same tokens and log-probabilities twice."""
    policy = _policy(case["model"])
    requests = _requests(case, policy, tokens=case["tokens"])
    first, second = (_sample(policy, requests) for _ in range(2))
    same = [(a.tokens, a.logprobs) == (b.tokens, b.logprobs) for a, b in zip(first, second, strict=True)]
    return {"samples_equal": sum(same) / len(same)}


PHASES = {
    "decode": decode,
    "first_token": first_token,
    "precision": precision,
    "graph": graph,
    "swap": swap,
    "parity": parity,
    "determinism": determinism,
    "update": update,
}


def prepare(case: Case) -> MeasureOnce:
    """The phase that the case names."""
    return lambda: PHASES[case["phase"]](case)


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_metal"], packages=["mlx", "mlx-lm"])
