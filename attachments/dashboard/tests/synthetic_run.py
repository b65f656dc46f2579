"""Run directories with made-up contents: any number of groups, several types, all outcomes, and per-token values.

    python -m attachments.dashboard.tests.synthetic_run DIRECTORY [--groups N] [--steps N] [--group-size N] [--length N]

The files have the formats of a real run. The same arguments give the same files, except for the run directory's path.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from msgspec import Struct
from safetensors.numpy import save_file

from protocols.rollout import DiscardReason
from protocols.step import UpdateMetrics
from training_run.profile.load import load_profile, write_profile

TYPES = ("sum", "sequence", "word", "choice")
REASONS: tuple[str, ...] = get_args(DiscardReason)
MARKUP = "<script>document.title = 'executed'</script><img src=x onerror=\"document.title='executed'\">"
"""The text of the second completion of group 1. A page that interprets it changes its title."""

WORDS = (
    "first", "add", "the", "two", "numbers", "and", "carry", "one", "so", "that", "sum", "is", "then", "check",
    "again", "because", "result", "of", "ten", "Zoë", "has", "boxes", "with", "shells", "müssen", "数", "🐚",
)  # fmt: skip
EPISODES = ((34, 0), (58, 0))
"""Group and number of each completion with several turns. Of 64 groups, the second has per-token values."""
PARTS = ("format", "math_eval", "choice_correctness")
SECONDS_PER_STEP = 3.0


class RunShape(Struct, frozen=True, kw_only=True):
    """What a made-up run contains.

    groups, steps: total numbers; planned_steps: steps of the complete run. length: mean number of tokens of a
    completion. token_steps: number of the latest steps that have per-token values.
    """

    groups: int = 64
    steps: int = 8
    planned_steps: int = 12
    group_size: int = 4
    length: int = 24
    token_steps: int = 2
    seed: int = 0


def write_run(directory: Path, shape: RunShape = RunShape()) -> Path:  # noqa: B008  (immutable)
    """Write a run directory, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    overrides = {"steps": shape.planned_steps, "run_dir": str(directory), "learner.batch_size": 8}
    write_profile(load_profile("local-m3", overrides), directory / "profile.toml")
    groups = list(made_groups(shape))
    _write_lines(directory / "rollouts.jsonl", groups)
    _write_lines(directory / "metrics.jsonl", list(made_metrics(shape, groups)))
    _write_lines(directory / "evaluations.jsonl", list(made_evaluations(shape)))
    _write_lines(directory / "timeline.jsonl", list(made_timeline(shape)))
    (directory / "preflight.json").write_bytes(msgspec.json.encode({"findings": [FINDING]}))
    if shape.token_steps:
        (directory / "tokens").mkdir(exist_ok=True)
        for step in range(max(1, shape.steps - shape.token_steps + 1), shape.steps + 1):
            write_tokens(directory, step, [group for group in groups if group["step"] == step])
    return directory


FINDING = {
    "name": "swap_in_use",
    "severity": "warning",
    "fact": "1.5 GB of swap are in use.",
    "consequence": "Updates can take several times as long.",
    "advice": "Close other programs, or lower engine.kv_cache_tokens.",
    "example": "",
}
"""A finding of the start and of the latest step."""


def made_groups(shape: RunShape) -> Iterator[dict[str, Any]]:
    """Yield the lines of rollouts.jsonl, in order of `step`.

    Group 0 is long and was trained on; group 1 contains `MARKUP`. Every discard reason occurs in a run of 18 groups.
    """
    source = random.Random(shape.seed)
    texts = [" ".join(source.choices(WORDS, k=max(4, shape.length))) for _ in range(64)]
    for number in range(shape.groups):
        step = 1 + number * shape.steps // shape.groups
        reason = None if number % 2 == 0 else REASONS[number // 2 % len(REASONS)]
        is_scored = reason in (None, "zero_variance", "stale", "not_finite", "surplus")
        solved = number % (shape.group_size + 1)
        completions = [
            _completion(source, shape, texts, number, index, step, reason, is_scored=is_scored, solved=solved)
            for index in range(shape.group_size)
        ]
        yield {
            "group_id": number,
            "step": step,
            "outcome": "trained" if reason is None else "discarded",
            "reason": reason,
            "detail": None if reason is None else f"made up: {reason}",
            "prompt": f"What is {number} + {number % 7}?\nAnswer in <answer> tags. {texts[number % 64][:60]}",
            "answer": str(number + number % 7),
            "type": TYPES[number % len(TYPES)],
            "environment": "" if number % 8 else "gsm8k_server",
            "completions": completions if reason != "generation_error" else [],
        }


def _completion(
    source: random.Random,
    shape: RunShape,
    texts: list[str],
    number: int,
    index: int,
    step: int,
    reason: str | None,
    *,
    is_scored: bool,
    solved: int,
) -> dict[str, Any]:
    is_truncated = (number + index) % 5 == 0
    is_right = index < solved and reason != "zero_variance"
    tail = "" if is_truncated else f"</think><answer>{number + number % 7 + (not is_right)}</answer>"
    text = MARKUP if (number, index) == (1, 1) else f"<think>{texts[(number + 7 * index) % 64]}{tail}"
    version = max(0, step - 1 - number % 3)
    parts = {"format": 0.0 if is_truncated else 0.2, "math_eval": float(is_right), "choice_correctness": None}
    reward = sum(value for value in parts.values() if value is not None)
    return {
        "text": text, "reward": reward if is_scored else None, "parts": parts if is_scored else {},
        "advantage": reward - 0.6 if reason is None else None, "first_version": version,
        "last_version": version + (number + index) % 2, "finish_reason": "length" if is_truncated else "stop",
        "tokens": len(_pieces(text)), "turns": _turns(text) if (number, index) in EPISODES else [],
    }  # fmt: skip


UNUSED = (
    "agent/turns", "agent/tool_calls", "agent/tool_errors", "agent/limited", "agent/failed", "agent/forked",
    "agent/seconds", "adalora/mean_rank", "adalora/smallest_rank", "adalora/largest_rank", "critic/value_loss",
    "critic/explained_variance", "critic/mean_value", "distillation/kl", "distillation/teacher_logprob",
    "distillation/taught", "distillation/seconds", "distillation/retries", "distillation/failed", "sessions/open",
    "sessions/rewarded", "sessions/dropped", "sessions/refused", "sessions/forked", "sessions/untrainable",
    "preference/epochs", "preference/cut", "verifiers/turns", "verifiers/tool_calls", "verifiers/tool_errors",
    "verifiers/limited", "verifiers/failed", "verifiers/forked", "verifiers/seconds", "sft/epochs", "sft/cut",
    "stages/stage",
)  # fmt: skip
"""Metrics of attachments that the run does not use: null."""


def made_metrics(shape: RunShape, groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl. Step 3 has no update, so that its metrics of the update are null."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for group in groups:
        by_step.setdefault(group["step"], []).append(group)
    for step in range(1, shape.steps + 1):
        own = by_step.get(step, [])
        reasons = [group["reason"] for group in own if group["reason"]]
        progress = step / shape.steps
        update = {name: _made_value(name, progress) for name in UpdateMetrics.__struct_fields__}
        yield {
            "step": step,
            "policy_version": step,
            "weights_hash": f"{step:064x}",
            "time/run": SECONDS_PER_STEP * step,
            "reward/mean": 1.2 * progress,
            "reward/std": 0.5,
            "rewards": {
                name: {"mean": progress, "std": 0.4, "count": 8 * shape.group_size, "spread": 1.0, "failures": 0}
                for name in PARTS
            },
            **(update if step != 3 else dict.fromkeys(update)),
            "groups/trained": len(own) - len(reasons),
            "groups/discarded": len(reasons),
            "groups/discarded_by_reason": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
            "groups/solved_all": 0.4 * progress,
            "groups/solved_none": 0.3 * (1 - progress),
            "groups/mixed": 0.7 - 0.1 * progress,
            "groups/replaced": 0,
            "groups/replayed": 0,
            **dict.fromkeys(UNUSED),
            "curriculum/zero_variance_expected": 0.3 * (1 - progress),
            "curriculum/zero_variance_observed": 0.25,
            "curriculum/success_rate": 0.5 * progress,
            "curriculum/problems": {"0.0-0.2": 50 - step, "0.4-0.6": step},
            "staleness/mean": 0.5 + progress,
            "staleness/max": 2,
            "staleness/histogram": {"0": 3, "1": 4, "2": 1},
            "completion_length/mean": shape.length * (1 + progress),
            "completion_length/terminated": 0.9 * shape.length * (1 + progress),
            "completion_length/total": 32 * shape.length,
            "truncated_fraction": 0.25 * (1 - progress),
            "tokens_per_second": 2000 + 100 * math.sin(step),
            "decode_tokens_per_second/idle": 4000.0,
            "decode_tokens_per_second/learning": 1500.0,
            "speculation/passes": 0,
            "speculation/draft_tokens": 0,
            "speculation/accepted_tokens": 0,
            "sequences_limit": 256,
            "time/decode": 2.0,
            "time/update": 0.8,
            "time/longest_learner_turn": 0.05,
            "time/wait_for_rollouts": 1.1,
            "time/weight_swap": 0.004,
            "peak_memory_bytes": 900_000_000,
            "resources/resident_bytes": 1_200_000_000,
            "resources/cpu_share": 1.8,
            "resources/swap_bytes": 0,
            "resources/swap_change_bytes": 0,
            "resources/available_bytes": 9_000_000_000,
            "resources/gpu_share": 0.7,
            "resources/power_watts": None,
            "findings": [FINDING] if step == shape.steps else [],
            "rolled_back": False,
            "environments": {"gsm8k_server": {"groups/trained": 1, "reward/mean": progress}},
            "remote_servers": {},
            "learner_ranks": {},
            "time/wait_for_ranks": None,
        }


def _made_value(name: str, progress: float) -> float | int | bool:
    made: dict[str, float | int | bool] = {
        "update_applied": True, "optimizer_steps": 1, "trained_tokens": 4096, "clip_fraction": 0.05 * progress,
        "mismatch_kl": 1e-10, "ess": 1 - 0.2 * progress, "entropy": 2 - progress, "kl": 0.02 * progress,
    }  # fmt: skip
    return made.get(name, 0.1 + progress)


def made_evaluations(shape: RunShape) -> Iterator[dict[str, Any]]:
    """Yield the lines of evaluations.jsonl: before, in the middle, and after."""
    for step in sorted({0, shape.steps // 2, shape.steps}):
        accuracy = 0.25 + 0.5 * step / shape.steps
        yield {
            "step": step, "policy_version": step, "accuracy": accuracy,
            "accuracy_interval": [accuracy - 0.04, accuracy + 0.04], "accuracy_by_type": dict.fromkeys(TYPES, accuracy),
            "problems": 512, "ungraded": 0, "failed": 0, "reward": _mean(1.2 * accuracy),
            "rewards": {"exact": _mean(accuracy), "format": _mean(1.0)}, "loss": _mean(2.0 - accuracy),
            "completion_length/mean": 40.0 - 20 * accuracy, "truncated_fraction": 0.1 * (1 - accuracy), "samples": 4,
            "avg_at_k": _mean(0.9 * accuracy), "pass_at": {"2": _mean(accuracy), "4": _mean(1.1 * accuracy)},
            "sampled_reward": _mean(1.1 * accuracy), "completion_tokens": 9000, "time/evaluation": 2.5,
            "time/run": SECONDS_PER_STEP * step + 1.0, "final": step == shape.steps,
        }  # fmt: skip


def _mean(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.04, "high": value + 0.04, "problems": 512}


def made_timeline(shape: RunShape) -> Iterator[dict[str, Any]]:
    """Yield the lines of timeline.jsonl, one per second."""
    for second in range(1, int(SECONDS_PER_STEP * shape.steps) + 1):
        step = int((second - 1) / SECONDS_PER_STEP)
        is_learning = second % int(SECONDS_PER_STEP) == 0
        yield {
            "t": second + 0.01,
            "decode": 0.4 if is_learning else 0.8,
            "learn": 0.5 if is_learning else 0.0,
            "other": 0.05,
            "overlap": 0.4 if is_learning else 0.0,
            "swaps": [second - 0.2] if is_learning else [],
            "version": step,
            "step": step,
            "rows": 64,
            "queues": {"prompts": 2, "rollouts": 0, "scored": second % 3, "reports": 0, "updates.broadcaster": 0},
            "waiting": "" if is_learning else "5 of 8 groups have arrived; 6 are decoded, 1 is scored",
            "groups": {"queued": 2, "decoding": 6, "scoring": 1, "waiting": 5},
        }


def write_tokens(directory: Path, step: int, groups: list[dict[str, Any]]) -> Path:
    """Write the per-token values of the groups of one step, as tokens/step-000007.safetensors."""
    source = np.random.default_rng(step)
    rows = [(group, i, c) for group in groups for i, c in enumerate(group["completions"])]
    pieces = [_pieces(completion["text"]) for _, _, completion in rows]
    lengths = [len(found) for found in pieces]
    encoded = [piece.encode() for found in pieces for piece in found]
    count = len(encoded)
    is_trained = np.repeat([group["outcome"] == "trained" for group, _, _ in rows], lengths).astype(bool)
    versions = [
        np.where(np.arange(length) * 2 < length, completion["first_version"], completion["last_version"])
        for (_, _, completion), length in zip(rows, lengths, strict=True)
    ]
    sampled = -source.exponential(0.7, count)
    learned = sampled + source.normal(0.0, 0.2, count)
    cut = np.where(is_trained, source.choice(4, count, p=[0.85, 0.08, 0.05, 0.02]), 4).astype(np.uint8)
    share = np.where(cut == 0, source.random(count), 0.0)
    missing = np.where(is_trained, 0.0, np.nan)
    advantages = [completion["advantage"] or 0.0 for _, _, completion in rows]
    values: dict[str, Any] = {
        "completion_group": np.asarray([group["group_id"] for group, _, _ in rows], np.int64),
        "completion_index": np.asarray([index for _, index, _ in rows], np.int32),
        "completion_start": np.cumsum([0, *lengths]).astype(np.int64),
        "token": source.integers(0, 50_000, count).astype(np.int32),
        "text_start": np.cumsum([0, *map(len, encoded)]).astype(np.int64),
        "text": np.frombuffer(b"".join(encoded), np.uint8),
        "version": np.concatenate([*versions, np.zeros(0)]).astype(np.int32),
        "sampled_logprob": sampled.astype(np.float32),
        "learner_logprob": (learned + missing).astype(np.float32),
        "ratio": (np.exp(learned - sampled) + missing).astype(np.float32),
        "advantage": np.repeat(advantages, lengths).astype(np.float32),
        "cut": cut,
        "gradient_share": (share / max(float(share.sum()), 1e-9)).astype(np.float32),
    }
    path = directory / "tokens" / f"step-{step:06d}.safetensors"
    save_file(values, path, metadata={"step": str(step), "format": "1"})
    return path


def _turns(text: str) -> list[dict[str, Any]]:
    """Return a message of the policy that calls a tool, 2 tokens of an environment, and the rest as another message."""
    tokens, characters = len(_pieces(text)), len(text)
    parts = ((True, 3, 12), (False, 2, 8), (True, tokens - 5, characters - 20))
    turns = [{"sampled": sampled, "tokens": count, "characters": size, "tools": []} for sampled, count, size in parts]
    return [{**turns[0], "tools": ["add"]}, *turns[1:]]


def _pieces(text: str) -> list[str]:
    """Split a text into made-up tokens of four characters."""
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"".join(encoder.encode(record) + b"\n" for record in records))


def main() -> None:
    """Write the run that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    for name, default in (("groups", 64), ("steps", 8), ("group-size", 4), ("length", 24), ("token-steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    shape = RunShape(
        groups=chosen.groups,
        steps=chosen.steps,
        planned_steps=chosen.steps + 4,
        group_size=chosen.group_size,
        length=chosen.length,
        token_steps=chosen.token_steps,
    )
    sys.stdout.write(f"{write_run(chosen.directory, shape)}\n")


if __name__ == "__main__":
    main()
