"""Our decode engine on groups of completions: in this process, tick by tick, as the compute thread drives it."""

from __future__ import annotations

from bench.contenders.decoding import timed, work
from bench.contenders.loop import Case, Once, serve
from bench.shapes import policy_of
from clotho.config.schema import EngineSection
from clotho.inference import DecodeEngine
from protocols.sampling import CompletionDone, SampleEvent, SampleRequest, Sampling

SEMANTICS = (
    "The decode engine with the profile's default settings, one request per prompt with a seed per completion, which "
    "computes each prompt once; from the first submission to the last completion, which brings tokens, the "
    "log-probability of each under the distribution it was sampled from, and no text."
)


def prepare(case: Case) -> Once:
    """An engine over the bare model: no adapter adds to its arithmetic, and no prompt is remembered between runs."""
    ready = work(case)
    engine = DecodeEngine(policy_of(ready.model, ready.config), EngineSection())
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
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
