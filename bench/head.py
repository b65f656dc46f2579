"""On Linux, norms, gates, attention and LoRA are those of attachments/cpu; nothing here was measured on Metal.

Measures the output head at large vocabularies, chunked and straightforward.

    python -m bench head [--vocabulary 151936] [--tokens 512] [--repeats 5]

One policy update (gradient and optimizer step) of 4 completions on a random Qwen3 shape of two layers with an adapter.
The straightforward way computes the logits of all positions, their log-softmax and their entropy, and uses MLX's
automatic differentiation. Everything else is equal. Both alternate; peak memory is `mx.get_peak_memory`, times are
medians over the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint
from bench.shapes import random_policy
from clotho.models.policy import Policy
from clotho.scoring.head_scores import SamplingDistribution, TokenScores
from clotho.scoring.sequences import MicroBatch
from clotho.settings.engine import SamplingSection
from clotho.settings.learner import LearnerSection
from clotho.training.update import PolicyLearner
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion

NAME = "head"
RESULTS = ROOT / "bench" / "results" / "head.jsonl"
SEQUENCES = 4


class HeadCost(Struct, frozen=True, kw_only=True):
    """One vocabulary. seconds, bytes: of one update. time_ratios: chunked / straightforward, pair by pair."""

    vocabulary: int
    tokens: int
    width: int
    plain_seconds: float
    seconds: float
    time_ratios: list[float]
    plain_bytes: int
    bytes: int
    command: str
    fingerprint: Fingerprint


class Straightforward:
    """Teacher-forced log-probabilities from the logits of all positions at once."""

    layout = "padded"

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(
        self, micro: MicroBatch, *, distribution: SamplingDistribution, logp_only: bool = False
    ) -> TokenScores:
        """Score the tokens of a padded micro-batch. logp_only: the entropy has no gradient."""
        logits_B_S_V = self._model(mx.array(micro.inputs[0])).astype(mx.float32) / distribution.temperature
        logp_B_S_V = logits_B_S_V - mx.logsumexp(logits_B_S_V, axis=-1, keepdims=True)
        entropy_P = -mx.sum(mx.exp(logp_B_S_V) * logp_B_S_V, axis=-1).reshape(-1)
        entropy_P = mx.stop_gradient(entropy_P) if logp_only else entropy_P
        logp_P_V = logp_B_S_V.reshape(-1, logp_B_S_V.shape[-1])
        position_N, target_N = mx.array(micro.table.position_N), mx.array(micro.table.target_N)
        return TokenScores(logp_P_V[position_N, target_N], entropy_P[position_N])


def group(vocabulary: int, tokens: int) -> ScoredGroup:
    """Completions of random tokens, half of them rewarded."""
    rng = np.random.default_rng(0)
    completions = tuple(
        Completion(
            tokens=tuple(int(t) for t in rng.integers(0, vocabulary, tokens)),
            logprobs=(-float(np.log(vocabulary)),) * tokens,
            versions=(0,) * tokens,
            text="",
            finish_reason="length",
        )
        for _ in range(SEQUENCES)
    )
    prompt = Prompt(group_id=0, problem=Problem(prompt="", answer="", type=""), tokens=(1,), seed=0)
    rewards = tuple(float(i % 2) for i in range(SEQUENCES))
    return ScoredGroup(group=RolloutGroup(prompt=prompt, completions=completions), rewards=rewards, parts={})


def make_learner(policy: Policy, *, plain: bool) -> PolicyLearner:
    """A learner with the chunked head, or with the straightforward head."""
    settings = LearnerSection(layout="padded", micro_batch_tokens=2**20)
    learner = PolicyLearner(policy, settings, SamplingSection(max_tokens=4096), steps=10)
    if plain:
        vars(learner)["_forcing"] = Straightforward(learner.model.model)
    return learner


def update(policy: Policy, scored: ScoredGroup, *, plain: bool) -> tuple[float, int]:
    """Seconds and peak bytes of one update."""
    learner = make_learner(policy, plain=plain)
    mx.clear_cache()
    mx.reset_peak_memory()
    began = time.perf_counter()
    learner.update([scored])
    return time.perf_counter() - began, mx.get_peak_memory()


def measure(vocabulary: int, tokens: int, width: int, repeats: int) -> HeadCost:
    """Measure both alternately, after one warmup of each."""
    policy = random_policy(layers=2, width=width, heads=4, key_heads=2, feed_forward=3 * width, vocabulary=vocabulary)
    scored = group(vocabulary, tokens)
    pairs = [(update(policy, scored, plain=True), update(policy, scored, plain=False)) for _ in range(repeats + 1)][1:]
    return HeadCost(
        vocabulary=vocabulary,
        tokens=tokens,
        width=width,
        plain_seconds=statistics.median(plain[0] for plain, _ in pairs),
        seconds=statistics.median(ours[0] for _, ours in pairs),
        time_ratios=[ours[0] / plain[0] for plain, ours in pairs],
        plain_bytes=max(plain[1] for plain, _ in pairs),
        bytes=max(ours[1] for _, ours in pairs),
        command="python -m bench head",
        fingerprint=fingerprint(),
    )


def read(path: Path = RESULTS) -> list[HeadCost]:
    """Read all results; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=HeadCost) for line in path.read_bytes().splitlines()]


def table(results: Sequence[HeadCost]) -> str:
    """Format the results as Markdown."""
    head = [
        "vocabulary",
        "tokens",
        "width",
        "peak, straightforward",
        "peak, chunked",
        "time, chunked / straightforward",
    ]
    rows = ["| " + " | ".join(head) + " |", "|---:" * len(head) + "|"]
    for one in results:
        spread = f"{min(one.time_ratios):.2f} to {max(one.time_ratios):.2f}"
        rows.append(
            f"| {one.vocabulary:,} | {SEQUENCES} x {one.tokens} | {one.width} | {one.plain_bytes / 1e9:.2f} GB "
            f"| {one.bytes / 1e9:.2f} GB ({one.bytes / one.plain_bytes:.0%}) "
            f"| {statistics.median(one.time_ratios):.2f} ({spread}) |"
        )
    machine = describe_fingerprint(results[0].fingerprint)
    note = "One policy update of a random Qwen3 shape with two layers in float32 and an adapter of rank 8."
    return "\n".join([*rows, "", f"{note} {machine}. `python -m bench head`"])


def main(argv: Sequence[str]) -> int:
    """Measure and replace bench/results/head.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m bench head", description=__doc__)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_768, 151_936])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args(argv)
    results = [measure(size, chosen.tokens, chosen.width, chosen.repeats) for size in chosen.vocabulary]
    RESULTS.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in results))
    sys.stdout.write(table(results) + "\n")
    return 0
