"""The benchmark of speculative rollouts."""

from __future__ import annotations

import pytest

from bench.speculation import STEPS_OF_EPOCH, epochs


def lines(*steps: tuple[int, int, float]) -> list[dict[str, float]]:
    """Return the keys of metrics.jsonl that the benchmark reads: tokens, forward passes and seconds of decoding.

    A step takes two seconds.
    """
    return [
        {
            "time/run": 2.0 * (i + 1),
            "tokens_per_second": tokens / 2.0,
            "speculation/passes": passes,
            "time/decode": seconds,
        }
        for i, (tokens, passes, seconds) in enumerate(steps)
    ]


def test_tokens_are_divided_by_forward_passes() -> None:
    """Per epoch, over all of its steps. A run without speculation counts no passes: each samples one token."""
    steps = [(100, 0, 1.0)] * STEPS_OF_EPOCH + [(100, 50, 0.5), (200, 25, 0.25)] * (STEPS_OF_EPOCH // 2)
    first, second = epochs(lines(*steps))
    assert first == {"tokens_per_forward": 1.0, "decode_rate": 100.0}
    assert second == {"tokens_per_forward": pytest.approx(4.0), "decode_rate": pytest.approx(400.0)}
