"""Clotho's decode engine on groups of completions, one decode step at a time, as the decode thread runs it."""

from __future__ import annotations

from typing import Any

from mlx.utils import tree_unflatten

from bench.contenders.decoding import adapter_weights, timed, work
from bench.contenders.rollouts import RANK, SCALE
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, serve
from bench.shapes import make_policy
from clotho.inference.engine import DecodeEngine
from clotho.models.parameters import flat
from clotho.models.policy import Policy
from clotho.settings.engine import EngineSection
from clotho.settings.model import Lora, PolicySection
from protocols.sampling import CompletionDone, SampleEvent, SampleRequest, Sampling


def policy_of(case: Case, model: Any, config: dict[str, Any]) -> Policy:
    """A policy without an adapter, or with one if the case has the key `adapter`."""
    if "adapter" not in case:
        return make_policy(model, config)
    policy = make_policy(model, config, section=PolicySection(method=Lora(rank=RANK, scale=SCALE)))
    shapes = {name: array.shape for name, array in flat(policy.trainable()).items()}
    policy.publish(tree_unflatten(list(adapter_weights(shapes).items())), version=1, step=1, fingerprint="")
    return policy


def prepare(case: Case) -> MeasureOnce:
    """An engine; no prefix cache is reused between runs."""
    ready = work(case)
    section = EngineSection() if ready.at_once == ready.rows else EngineSection(max_num_seqs=ready.at_once)
    engine = DecodeEngine(policy_of(case, ready.model, ready.config), section)

    def generate() -> int:
        ended: list[SampleEvent] = []
        for number, (prompt, tokens) in enumerate(zip(ready.prompts, ready.lengths, strict=True)):
            sampling = Sampling(max_tokens=tokens, ignore_eos=True)
            seeds = tuple(range(number * ready.group, (number + 1) * ready.group))
            engine.submit(SampleRequest(prompt=tuple(prompt), sampling=sampling, seeds=seeds), ended.append)
        while engine.has_work:
            engine.tick()
        return sum(len(event.completion.logprobs) for event in ended if isinstance(event, CompletionDone))

    return timed(ready, generate, prefilled=sum(len(prompt) - 1 for prompt in ready.prompts))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_decode"], packages=["mlx", "mlx-lm"])
