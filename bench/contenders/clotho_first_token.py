"""Clotho's decode engine with one request of one completion: seconds until its first token."""

from __future__ import annotations

import time

from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model, random_prompts
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from bench.shapes import make_policy
from clotho.inference.engine import DecodeEngine
from clotho.settings.engine import EngineSection
from protocols.sampling import SampleEvent, SampleRequest, Sampling, TokenSampled


def prepare(case: Case) -> MeasureOnce:
    """An idle engine with an empty prefix cache."""
    model, config = named_model(case["model"])
    engine = DecodeEngine(make_policy(model, config), EngineSection())
    (prompt,) = random_prompts(1, case["prompt_tokens"], config["vocab_size"])
    sampling = Sampling(max_tokens=16, ignore_eos=True)
    request = SampleRequest(prompt=tuple(prompt), sampling=sampling, seeds=(0,), stream=True)

    def once() -> Metrics:
        events: list[SampleEvent] = []
        began = time.perf_counter()
        request_id = engine.submit(request, events.append)
        while engine.has_work and not events:
            engine.tick()
        seconds = time.perf_counter() - began
        if not events or not isinstance(events[0], TokenSampled):
            raise RuntimeError(f"no token was sampled: {events}")
        engine.abort(request_id)
        while engine.has_work:
            engine.tick()
        return {"seconds": seconds}

    return once


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_first_token"], packages=["mlx", "mlx-lm"])
