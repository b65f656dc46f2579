"""Reports, gauges and facts for the tests of metrics and displays."""

from __future__ import annotations

from typing import Any

from protocols.compute import MachineDescription, PolicyDescription
from protocols.evaluation import Estimate, EvalReport
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, DiscardReason, RolloutGroup, ScoredGroup
from protocols.sampling import Completion, FinishReason
from protocols.step import StepReport, TrainedGroup, UpdateMetrics
from protocols.summary import QueueGauge, RunGauges
from training_run.records.display import RunFacts

HOSTILE = (
    "[bold red]x[/] [/nope] \x1b[2J\x1b]0;title\x07 \r\n \u202eesrever\u202c 漢字 👩\u200d🚀 \ud800 ﷽" + "w" * 3000
)

GAUGES = RunGauges(
    queues=(QueueGauge(name="rollouts", depth=3, capacity=16), QueueGauge(name="scored", depth=0, capacity=16)),
    tokens_sampled=123_456,
    decode_seconds=7.5,
    decode_rate_idle=2000.0,
    decode_rate_learning=1100.0,
    decode_share_learning=0.52,
    rows_running=64,
    api_requests=2,
    swaps=9,
    swap_seconds_last=0.0004,
    swap_seconds_median=0.0005,
    swap_seconds_max=0.002,
    peak_memory_bytes=300 << 20,
)


def facts(steps: int = 100) -> RunFacts:
    """Return the facts of a small run."""
    return RunFacts(
        profile="local-m3",
        model="profiles/embedded",
        machine=MachineDescription(
            processor="Apple M3", cores=8, memory_bytes=16 << 30, backend="Metal", device="gpu", mlx_version="0.32.4",
            blas="Accelerate", system="macOS 15.1",
        ),
        compute_path="MLX",
        policy=PolicyDescription(
            architecture="qwen3", parameters=900_000, trainable_parameters=40_000, bytes=3_800_000,
            quantization_bits=None, dtype="float32", layers=4, hidden_size=128, vocab_size=64, context_length=512,
        ),
        address="http://127.0.0.1:8000",
        run_dir="runs/local-m3",
        steps=steps,
        estimated_memory=400 << 20,
    )  # fmt: skip


def completion(text: str = "<answer>4</answer>", tokens: int = 3, finish: FinishReason = "stop") -> Completion:
    """Return a completion sampled by versions 1 and 2."""
    versions = (1,) * (tokens - 1) + (2,)
    return Completion(
        tokens=tuple(range(tokens)), logprobs=(-0.5,) * tokens, versions=versions, text=text, finish_reason=finish
    )


def prompt(group_id: int = 0, text: str = "What is 2 + 2?") -> Prompt:
    """Return a prompt of type arithmetic."""
    return Prompt(
        group_id=group_id, problem=Problem(prompt=text, answer="4", type="arithmetic"), tokens=(1, 2), seed=group_id
    )


def trained(group_id: int = 0, rewards: tuple[float, ...] = (1.0, 0.0), text: str = "What is 2 + 2?") -> TrainedGroup:
    """Return a trained group of two completions."""
    group = RolloutGroup(prompt=prompt(group_id, text), completions=tuple(completion(text) for _ in rewards))
    parts: dict[str, tuple[float | None, ...]] = {"format": rewards, "jaccard": (None,) * len(rewards)}
    return TrainedGroup(scored=ScoredGroup(group=group, rewards=rewards, parts=parts), advantages=(1.0, -1.0))


def discarded(group_id: int = 1, reason: DiscardReason = "zero_variance", *, sampled: bool = True) -> Discarded:
    """Return a discarded group, with or without completions."""
    completions = (completion(finish="length"), completion(finish="length")) if sampled else ()
    rewards = (0.5, 0.5) if sampled else ()
    return Discarded(prompt=prompt(group_id), reason=reason, detail="why", completions=completions, rewards=rewards)


UPDATE = UpdateMetrics(
    loss=-0.01, kl=0.002, entropy=0.7, clip_fraction=0.01, mismatch_kl=1e-6, ratio_mean=1.0, grad_norm=0.3,
    learning_rate=1e-5, trained_tokens=6, update_applied=True, ess=0.9, rejected_fraction=0.0, kl_beta=0.0,
    entropy_coef=0.0,
    optimizer_steps=1,
)  # fmt: skip


def step(
    number: int,
    *,
    groups: tuple[TrainedGroup, ...] | None = None,
    discarded: tuple[Discarded, ...] = (),
    update: UpdateMetrics | None = UPDATE,
) -> StepReport:
    """Return the report of one step."""
    groups = (trained(number),) if groups is None else groups
    return StepReport(
        step=number, version=number, fingerprint="f", trained=groups, discarded=discarded, staleness=(1,) * len(groups),
        update=update, train_seconds=0.2, wait_seconds=0.1,
    )  # fmt: skip


def estimate(value: float, *, problems: int = 500) -> Estimate:
    """Return a mean with an interval of +- 0.125."""
    return Estimate(value=value, low=value - 0.125, high=value + 0.125, problems=problems)


MEASURES: dict[str, Any] = {
    "reward": estimate(0.75), "rewards": {"format": estimate(1.0)}, "loss": estimate(0.5, problems=20),
    "completion_length": 21.5, "truncated": 0.25, "samples": 4, "avg": estimate(0.5),
    "pass_at": {"2": estimate(0.625), "4": estimate(0.75)}, "sampled_reward": estimate(0.25),
}  # fmt: skip
"""Everything that an evaluation with sampled completions measures beside the accuracy."""


def ungraded_evaluation(number: int) -> EvalReport:
    """Return the evaluation of a step without any graded problem."""
    return EvalReport(
        step=number, version=number, problems=0, ungraded=500, failed=3, accuracy=None, interval=None, by_type={},
        completion_tokens=4000, seconds=2.0, final=False,
    )  # fmt: skip


def evaluation(number: int, accuracy: float, *, final: bool = False) -> EvalReport:
    """Return the evaluation of a step."""
    return EvalReport(
        step=number, version=number, problems=500, accuracy=accuracy, interval=(0.0, 1.0),
        by_type={"arithmetic": accuracy, "word": 0.25}, completion_tokens=4000, seconds=2.0, final=final,
    )  # fmt: skip
