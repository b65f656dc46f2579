"""Clotho's decode engine with a constant number of sequences, with and without a learner that always has work."""

from __future__ import annotations

import itertools
import threading
import time

from bench.contenders.scored_groups import groups
from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model, random_prompts
from bench.contenders.worker import Case, MeasureOnce, serve
from bench.shapes import make_policy
from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute
from clotho.models.machine import compute_slots
from clotho.models.policy import Policy
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.learner import LearnerSection
from clotho.settings.model import Lora, PolicySection
from clotho.training.update import PolicyLearner
from protocols.sampling import CompletionDone, SampleEvent, SampleRequest, Sampling

SECONDS = 3.0
"""Duration of the measurement without updates, and the time after which no further update starts."""
PROMPT, TOKENS, GROUP = 16, 96, 8
UPDATE = {"prompts": 16, "group": GROUP, "prompt_tokens": PROMPT, "completion_tokens": TOKENS}
UNENDING = Sampling(max_tokens=TOKENS, ignore_eos=True)


class ComputeThreadLoad:
    """Compute threads with a policy, its decode engine and its learner."""

    def __init__(self, case: Case) -> None:
        self.compute = Compute(decode_share=case["decode_share"], slots=compute_slots())
        self.compute.start()
        policy = self.compute.learner.submit(lambda: self._load(case["model"])).result()
        self.engine = self.compute.decode.submit(lambda: DecodeEngine(policy, EngineSection())).result()
        self.compute.decode.attach(self.engine)
        for number in range(case["rows"] // GROUP):
            self._ask(number)

    def _load(self, name: str) -> Policy:
        model, config = named_model(name)
        policy = make_policy(model, config, section=PolicySection(method=Lora(rank=16)))
        settings = LearnerSection(micro_batch_tokens=4096)
        sampling, lane = SamplingSection(max_tokens=TOKENS), self.compute.learner.lane
        self._learner = PolicyLearner(policy, settings, sampling, steps=1_000_000, lane=lane)
        self._prompt = tuple(random_prompts(1, PROMPT, policy.vocab_size)[0])
        self._groups = groups(UPDATE | {"vocabulary": policy.vocab_size})
        return policy

    def _ask(self, number: int) -> None:
        """Have a group of completions sampled, and another one when it is complete."""
        left = itertools.count(GROUP - 1, -1)

        def heard(event: SampleEvent) -> None:
            if isinstance(event, CompletionDone) and not next(left):
                self._ask(number + 1)

        request = SampleRequest(prompt=self._prompt, sampling=UNENDING, seeds=tuple(range(number, number + GROUP)))
        self.compute.decode.submit(lambda: self.engine.submit(request, heard))

    def idle(self) -> float:
        """Tokens per second without updates."""
        began, before = time.perf_counter(), self._sampled()
        time.sleep(SECONDS)
        return (self._sampled() - before) / (time.perf_counter() - began)

    def learning(self) -> float:
        """Tokens per second from the start of one update to the end of another, without pauses between updates."""
        over = threading.Event()

        def updates() -> None:
            while not over.is_set():
                self._learner.update(self._groups)

        began, before = time.perf_counter(), self._sampled()
        work = self.compute.learner.submit(updates)
        time.sleep(SECONDS)
        over.set()
        work.result()
        return (self._sampled() - before) / (time.perf_counter() - began)

    def _sampled(self) -> int:
        return self.compute.decode.submit(lambda: self.engine.stats().tokens_sampled).result()


def prepare(case: Case) -> MeasureOnce:
    """Start compute threads for this case after stopping the previous ones."""
    close()
    _open.append(load := ComputeThreadLoad(case))

    def both() -> dict[str, float]:
        idle, learning = load.idle(), load.learning()
        return {"idle": idle, "learning": learning, "kept": learning / idle}

    return both


_open: list[ComputeThreadLoad] = []


def close() -> None:
    """Stop the compute threads if some are running; a process must not exit while they work."""
    while _open:
        _open.pop().compute.stop()


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_overlap"], packages=["mlx", "mlx-lm"])
    close()
