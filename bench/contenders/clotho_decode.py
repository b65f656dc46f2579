"""Clotho's decode engine on groups of completions, one decode step at a time, as the compute thread runs it."""

from __future__ import annotations

from bench.contenders.decoding import timed, work
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, serve
from bench.shapes import make_policy
from clotho.config.schema import EngineSection
from clotho.inference import DecodeEngine
from protocols.sampling import CompletionDone, SampleEvent, SampleRequest, Sampling


def prepare(case: Case) -> MeasureOnce:
    """An engine on the bare model, without an adapter; no prefix cache is reused between runs."""
    ready = work(case)
    engine = DecodeEngine(make_policy(ready.model, ready.config), EngineSection())
    sampling = Sampling(max_tokens=ready.new_tokens, ignore_eos=True)

    def generate() -> int:
        ended: list[SampleEvent] = []
        for number, prompt in enumerate(ready.prompts):
            seeds = tuple(range(number * ready.group, (number + 1) * ready.group))
            engine.submit(SampleRequest(prompt=tuple(prompt), sampling=sampling, seeds=seeds), ended.append)
        while engine.has_work:
            engine.tick()
        return sum(len(event.completion.logprobs) for event in ended if isinstance(event, CompletionDone))

    return timed(ready, generate, prefilled=sum(len(prompt) - 1 for prompt in ready.prompts))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_decode"], packages=["mlx", "mlx-lm"])
