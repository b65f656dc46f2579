"""How well a policy answers: greedy accuracy and pass@k for each kind of problem."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache
from tokenizers import Tokenizer

from profiles.maker.problem import Problem
from profiles.maker.tokenizer import END, PAD, chat_prompt, token_id

MAX_TOKENS = 64
"""Longest completion that is counted, in tokens."""

FORM = re.compile(r"<think>[^<]*</think><answer>([^<]*)</answer>")
"""The whole of a well-formed completion; the group is the answer."""


@dataclass(frozen=True)
class Measurement:
    """What was measured over a set of problems, each answered greedily once and sampled `k` times at temperature 1."""

    accuracy: dict[str, float]
    """Share of greedy answers that are right, by kind, and under `all`."""
    pass_at_k: dict[str, float]
    """Share of problems with at least one right answer in k samples, likewise."""
    sampled_accuracy: dict[str, float]
    """Share of the samples that are right, likewise."""
    mean_tokens: float
    """Mean length of the samples, in tokens, with the end token."""
    count: int
    """Number of problems."""


def complete(model: nn.Module, tokenizer: Tokenizer, texts: list[str], temperature: float) -> list[list[int]]:
    """Answer each user message once, in token ids without the end token; greedily if `temperature` is 0."""
    pad, end = token_id(tokenizer, PAD), token_id(tokenizer, END)
    prompts = [tokenizer.encode(chat_prompt(text)).ids for text in texts]
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    cache = [BatchKVCache(padding) for _ in model.layers]
    tokens_B_T = mx.array([[pad] * n + prompt for n, prompt in zip(padding, prompts, strict=True)])
    done_B, columns = mx.zeros(len(texts), dtype=mx.bool_), []
    for _ in range(MAX_TOKENS):
        logits_B_V = model(tokens_B_T, cache=cache)[:, -1]
        token_B = mx.random.categorical(logits_B_V / temperature) if temperature else logits_B_V.argmax(axis=-1)
        done_B = done_B | (token_B == end)
        columns.append(mx.where(done_B, end, token_B))
        tokens_B_T = token_B[:, None]
        mx.eval(columns[-1])
        if done_B.all().item():
            break
    rows = cast(list[list[int]], mx.stack(columns, axis=1).tolist())
    return [row[: row.index(end)] if end in row else row for row in rows]


def is_right(text: str, answer: str) -> bool:
    """Tell whether a completion is well formed and its answer is `answer`, letter for letter."""
    match = FORM.fullmatch(text)
    return match is not None and match.group(1) == answer


def by_kind(values: list[tuple[str, float]]) -> dict[str, float]:
    """Average (kind, value) pairs: for each kind, and under `all`."""
    groups: dict[str, list[float]] = defaultdict(list)
    for kind, value in values:
        groups[kind].append(value)
        groups["all"].append(value)
    return {kind: sum(group) / len(group) for kind, group in sorted(groups.items())}


def measure(
    model: nn.Module, tokenizer: Tokenizer, problems: list[Problem], *, k: int = 8, batch: int = 128
) -> Measurement:
    """Answer every problem greedily and k times at temperature 1, `batch` rows at a time."""
    greedy: list[tuple[str, float]] = []
    passed: list[tuple[str, float]] = []
    sampled: list[tuple[str, float]] = []
    lengths: list[int] = []
    ordered = sorted(problems, key=lambda problem: len(problem.prompt))
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        texts = [problem.prompt for problem in part]
        right = [0] * len(part)
        for attempt in range(k + 1):
            rows = complete(model, tokenizer, texts, 1.0 if attempt else 0.0)
            for i, (problem, row) in enumerate(zip(part, rows, strict=True)):
                good = is_right(tokenizer.decode(row, skip_special_tokens=True), problem.answer)
                (sampled if attempt else greedy).append((problem.kind, float(good)))
                right[i] += good if attempt else 0
            lengths += [len(row) + 1 for row in rows if attempt]
        passed += [(problem.kind, float(count > 0)) for problem, count in zip(part, right, strict=True)]
    return Measurement(by_kind(greedy), by_kind(passed), by_kind(sampled), sum(lengths) / len(lengths), len(problems))
