"""The benchmark of speculative rollouts."""

from __future__ import annotations

import pytest

from bench.speculation import STEPS_OF_EPOCH, epochs


def line(tokens: int, accepted: int, seconds: float) -> dict[str, float]:
    """Return the keys of metrics.jsonl that the benchmark reads."""
    return {
        "completion_length/total": tokens,
        "speculation/accepted_tokens": accepted,
        "time/decode": seconds,
    }


def test_an_accepted_token_needs_no_forward_pass() -> None:
    """Per epoch, over all of its steps."""
    lines = [line(100, 0, 1.0)] * STEPS_OF_EPOCH + [line(100, 50, 0.5), line(200, 175, 0.25)] * (STEPS_OF_EPOCH // 2)
    first, second = epochs(lines)
    assert first == {"tokens_per_forward": 1.0, "decode_rate": 100.0}
    assert second == {"tokens_per_forward": pytest.approx(4.0), "decode_rate": pytest.approx(400.0)}
