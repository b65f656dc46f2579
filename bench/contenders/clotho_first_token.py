"""Our decode engine with one request of one completion: seconds until its first token is sampled."""

from __future__ import annotations

import time

from bench.contenders.loop import Case, Metrics, Once, serve
from bench.contenders.shapes import named_model, random_prompts
from bench.shapes import policy_of
from clotho.config.schema import EngineSection
from clotho.inference import DecodeEngine
from protocols.sampling import SampleEvent, SampleRequest, Sampling, TokenSampled

SEMANTICS = (
    "From submitting a streamed request to an idle decode engine until its first token has been reported, with its "
    "log-probability; the request asks for more tokens, and is given up then."
)


def prepare(case: Case) -> Once:
    """An idle engine that remembers no prompt."""
    model, config = named_model(case["model"])
    engine = DecodeEngine(policy_of(model, config), EngineSection())
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
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
