"""Our engine in our compute thread, kept full of rows, without and with a learner that never rests."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator

import numpy as np

from bench.contenders.loop import Case, Once, serve
from bench.contenders.shapes import named_model, random_prompts
from bench.shapes import policy_of
from clotho.config.schema import EngineSection, LearnerSection, PolicySection, SamplingSection
from clotho.inference import DecodeEngine
from clotho.runtime.compute_thread import ComputeExecutor
from clotho.training.update import PolicyLearner
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup
from protocols.sampling import Completion, CompletionDone, SampleEvent, SampleRequest, Sampling
from protocols.score import ScoredGroup

SEMANTICS = (
    "Engine and learner take turns in the compute thread by `decode_share`: tokens sampled per second of wall time, with "
    "nothing else to do, and while one update follows the other."
)
SECONDS = 3.0
"""That decoding alone is watched, and after which no further update begins."""
PROMPT, TOKENS, GROUP = 16, 96, 8
UPDATE_GROUPS = 16
UNENDING = Sampling(max_tokens=TOKENS, ignore_eos=True)


class Workplace:
    """The compute thread, with the policy, the engine and the learner that live in it."""

    def __init__(self, case: Case) -> None:
        self.executor = ComputeExecutor(decode_share=case["decode_share"])
        self.executor.start()
        self.executor.submit(lambda: self._load(case["model"])).result()
        self.executor.attach(self.engine)
        for number in range(case["rows"] // GROUP):
            self._ask(number)

    def _load(self, name: str) -> None:
        model, config = named_model(name)
        policy = policy_of(model, config, section=PolicySection(rank=16))
        self.engine = DecodeEngine(policy, EngineSection())
        settings = LearnerSection(micro_batch_tokens=4096)
        self._learner = PolicyLearner(policy, settings, SamplingSection(max_tokens=TOKENS), steps=1_000_000)
        self._prompt = tuple(random_prompts(1, PROMPT, policy.vocab_size)[0])
        self._groups = [_group(number, policy.vocab_size) for number in range(UPDATE_GROUPS)]

    def _ask(self, number: int) -> None:
        """Have a group of completions sampled, and another one when it is complete."""
        left = itertools.count(GROUP - 1, -1)

        def heard(event: SampleEvent) -> None:
            if isinstance(event, CompletionDone) and not next(left):
                self._ask(number + 1)

        request = SampleRequest(prompt=self._prompt, sampling=UNENDING, seeds=tuple(range(number, number + GROUP)))
        self.executor.submit(lambda: self.engine.submit(request, heard))

    def idle(self) -> float:
        """Tokens per second while nobody learns."""
        began, before = time.perf_counter(), self._drawn()
        time.sleep(SECONDS)
        return (self._drawn() - before) / (time.perf_counter() - began)

    def learning(self) -> float:
        """Tokens per second from the beginning of one update to the end of another, with no pause between them."""
        over = threading.Event()

        def updates() -> Generator[None, None, None]:
            while not over.is_set():
                yield from self._learner.update(self._groups)

        began, before = time.perf_counter(), self._drawn()
        work = self.executor.submit_steps(updates(), learning=True)
        time.sleep(SECONDS)
        over.set()
        work.result()
        return (self._drawn() - before) / (time.perf_counter() - began)

    def _drawn(self) -> int:
        return self.executor.submit(lambda: self.engine.stats().tokens_sampled).result()


def prepare(case: Case) -> Once:
    """A compute thread of this case alone: the one before has stopped."""
    close()
    _open.append(workplace := Workplace(case))

    def both() -> dict[str, float]:
        idle, learning = workplace.idle(), workplace.learning()
        return {"idle": idle, "learning": learning, "kept": learning / idle}

    return both


_open: list[Workplace] = []


def close() -> None:
    """Stop the compute thread, if there is one: a process must not end while it works."""
    while _open:
        _open.pop().executor.stop()


def _group(number: int, vocabulary: int) -> ScoredGroup:
    """Completions of random tokens, half of them rewarded."""
    rng = np.random.default_rng(number)
    completions = tuple(
        Completion(
            tokens=tuple(rng.integers(0, vocabulary, TOKENS).tolist()),
            logprobs=(-float(np.log(vocabulary)),) * TOKENS,
            versions=(0,) * TOKENS,
            text="",
            finish_reason="length",
        )
        for _ in range(GROUP)
    )
    problem = Problem(prompt="", answer="", type="")
    prompt = Prompt(group_id=number, problem=problem, tokens=tuple(range(PROMPT)), seed=number)
    rewards = tuple(float(i % 2) for i in range(GROUP))
    return ScoredGroup(group=RolloutGroup(prompt=prompt, completions=completions), rewards=rewards, parts={})


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
    close()
