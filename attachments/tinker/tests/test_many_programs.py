"""Many programs at once: none fails, none starves, and memory stays bounded."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from attachments.tinker.tests.tinker_server import Live, datum, tinker_server
from tests import saved_models

TOKENS = [3, 9, 12, 7, 20, 5, 30, 31, 32]
ROUNDS = {False: 6, True: 40}


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_programs_that_train_and_sample_at_once_have_equal_shares(tmp_path: Path, *, long: bool) -> None:
    """When the first has made its rounds, every other one has made half as many.

    Rounds of training are compared with each other, and rounds of sampling; each program has an adapter of its own.
    """
    saved_models.save(tmp_path / "model", dtype=mx.float32)
    trainers, samplers = (4, 16) if long else (2, 3)
    rounds, done = Counter[str](), threading.Event()
    with tinker_server(tmp_path / "model", tmp_path / "saved", "--server.tinker.max-samplers", "32") as live:
        names = [*(f"train-{index}" for index in range(trainers)), *(f"sample-{index}" for index in range(samplers))]
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=program, args=(live, name, rounds, done, ROUNDS[long], failures)) for name in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    for kind in ("train", "sample"):
        made = [rounds[name] for name in names if name.startswith(kind)]
        assert min(made) >= max(made) / 2, made
    if long:
        assert psutil.Process().memory_info().rss < 4 * 2**30


def program(
    live: Live, name: str, rounds: Counter[str], done: threading.Event, limit: int, failures: list[BaseException]
) -> None:
    """Train, or sample from one's own adapter, until every program has had its chance."""
    try:
        client = live.client()
        model_id = client.model("policy", rank=2 + len(name) % 3)
        sampler = client.sampler(model_id)
        while not done.is_set():
            if name.startswith("train"):
                client.gradient(model_id, [datum(TOKENS)] * 4)
                client.step(model_id, learning_rate=1e-3)
                client.sampler(model_id)
            else:
                client.sample(sampler, TOKENS, max_tokens=16, num_samples=2, stop=[])
            rounds[name] += 1
            if rounds[name] >= limit and name.startswith("train"):
                done.set()
        client.http.close()
    except BaseException as error:
        failures.append(error)
        done.set()
