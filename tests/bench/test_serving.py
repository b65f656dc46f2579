"""Benchmarks of serving and of the runtime: their programs, and results read from run files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx_lm
import pytest

from bench import save, serve, swap
from bench.contenders import clotho_save, clotho_serve, clotho_swap, http_server_load, mlx_lm_serve
from bench.contenders.http_clients import Load, first_token_seconds, throughput
from bench.contenders.http_model import write_adapter, write_model
from bench.contenders.shapes import EMBEDDED
from bench.studies import overlap
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.server import AdaptersSection
from tests.bench.fake_server import fake_server
from training_run.adapters.contents import adapter_targets
from training_run.adapters.reading import read_adapter

ONE_REQUEST = Load(clients=3, tokens=8, answers=1)


def test_every_client_gets_a_response_to_a_different_request() -> None:
    """Tokens are counted by the server."""
    with fake_server() as (port, asked):
        rate = throughput(port, ONE_REQUEST)
    assert rate.answer_tokens == 8
    assert rate.tokens_per_second > 0
    assert len(asked) == 3
    assert len({json.dumps(body) for body in asked}) == 3


def test_the_first_token_is_the_first_event_with_text() -> None:
    """Requests are streamed."""
    with fake_server() as (port, asked):
        assert first_token_seconds(port, ONE_REQUEST) > 0
    assert all(body["stream"] for body in asked)


def test_short_responses_are_an_error() -> None:
    """Their throughput would not be comparable."""
    with fake_server(limit=2) as (port, _), pytest.raises(ValueError, match=r"responses of 2\.0 tokens"):
        http_server_load.measure(port, ONE_REQUEST, streamed=1)


def test_first_tokens_are_measured_only_if_responses_are_streamed() -> None:
    """`bench serve` measures complete responses only."""
    with fake_server() as (port, asked):
        assert http_server_load.measure(port, ONE_REQUEST, streamed=0).keys() == {"tokens_per_second"}
        assert len(asked) == 3
        measured = http_server_load.measure(port, ONE_REQUEST, streamed=2)
    assert measured.keys() == {"tokens_per_second", "first_token_seconds"}
    assert sum(bool(body.get("stream")) for body in asked) == 6


def test_servers_are_started_with_an_adapter_only_if_the_case_has_one(tmp_path: Path) -> None:
    """Both servers read the same files."""
    for contender in (clotho_serve, mlx_lm_serve):
        plain = contender.command(http_server_load.Started(tmp_path / "model", None, 1))
        adapted = contender.command(http_server_load.Started(tmp_path / "model", tmp_path / "adapter", 1))
        assert str(tmp_path / "model") in plain
        assert adapted[: len(plain)] == plain
        assert str(tmp_path / "adapter") in adapted[-1]


def test_the_served_model_never_samples_its_end_token(tmp_path: Path) -> None:
    """The embedded files are not modified."""
    tokenizer = ChatTokenizer.from_files(write_model(EMBEDDED, tmp_path / "model"))
    assert tokenizer.eos_ids == {0}
    assert "<|im_start|>assistant" in "".join(
        tokenizer.token_text(token) for token in tokenizer.render_chat([{"role": "user", "content": "1 + 1"}])
    )


def test_swaps_are_measured_while_sequences_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repeat starts with an idle engine."""
    monkeypatch.setattr(clotho_swap, "SWAPS", 3)
    once = clotho_swap.prepare({"model": EMBEDDED, "weights": "lora"})
    for _ in range(2):
        metrics = once()
        assert 0 < metrics["swap_seconds"] <= metrics["longest_swap_seconds"]


def test_decode_steps_are_measured_while_checkpoints_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repeat saves and removes its own checkpoints."""
    monkeypatch.setattr(clotho_save, "SAVES", 2)
    monkeypatch.setattr(clotho_save, "STEPS_ALONE", 3)
    once = clotho_save.prepare({"model": EMBEDDED})
    for _ in range(2):
        metrics = once()
        assert metrics.keys() == {metric.name for metric in save.METRICS}
        assert metrics["save_seconds"] > 0
        assert metrics["median_delay_seconds"] <= metrics["longest_delay_seconds"]


def test_every_description_has_its_command() -> None:
    """The command has the name of the module."""
    for question in (overlap, save, serve, swap):
        assert f"python -m bench {question.NAME}" in (question.__doc__ or "")


def test_first_tokens_have_a_table_only_without_an_adapter() -> None:
    """With an adapter no response is streamed."""
    table = serve.table(serve.read())
    assert table.count("**tokens per second") == 2
    assert table.count("**first token seconds") == 1


def test_the_adapter_of_the_benchmark_fits_its_model(tmp_path: Path) -> None:
    """mlx-lm and Clotho read the same files, and the adapter changes every linear layer of the blocks."""
    model = write_model(EMBEDDED, tmp_path / "model")
    adapter = write_adapter(model, tmp_path / "adapter", rank=4)
    loaded: Any = mlx_lm.load(str(model), adapter_path=str(adapter))[0]
    base: Any = mlx_lm.load(str(model))[0]
    contents = read_adapter(adapter, adapter_targets(base), AdaptersSection())
    adapted = {name for name, module in loaded.named_modules() if "lora_a" in module}
    assert contents.rank == 4
    assert set(contents.scales) == adapted
    assert len(adapted) == 7 * len(base.layers)
