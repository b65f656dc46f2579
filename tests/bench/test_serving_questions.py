"""What is measured of serving and of the runtime: the small parts of its programs, and what a run's files say."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import actors_overhead, http, overlap, startup, swap
from bench.contenders import asyncio_messages, clotho_messages, clotho_swap, commands, http_loads
from bench.contenders.http_clients import Load, first_token_seconds, throughput
from bench.contenders.http_model import write_model
from bench.contenders.shapes import EMBEDDED
from bench.measurement import write
from bench.runs import Record
from clotho.models.tokenizer import ChatTokenizer

ONE_REQUEST = Load(clients=3, tokens=8, answers=1)


class FakeServer(BaseHTTPRequestHandler):
    """Answers in the shape of OpenAI's chats, with as many tokens as asked for, or as many as `limit` lets it."""

    limit = 1_000
    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        """Answer whole, or as a stream whose first event has no text."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(200)
        self.end_headers()
        if body.get("stream"):
            for delta in ({"role": "assistant"}, {"content": "a"}, {"content": "b"}):
                self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            usage = {"completion_tokens": min(body["max_tokens"], self.limit)}
            self.wfile.write(json.dumps({"usage": usage}, indent=1).encode())

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Say nothing."""


@contextmanager
def fake_server(limit: int = 1_000) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Its port, and what it has been asked."""
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (FakeServer,), {"asked": asked, "limit": limit})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()
            thread.join()


def record(*lines: dict[str, Any]) -> Record:
    """A run of which only its metrics matter."""
    return Record([{"train_seconds": 1.0, **line} for line in lines], [], {}, launched=0.0)


def test_every_client_has_an_answer_and_no_two_ask_the_same() -> None:
    """Also where the time is over at once; tokens are those that the server counts."""
    with fake_server() as (port, asked):
        rate = throughput(port, ONE_REQUEST)
    assert rate.answer_tokens == 8
    assert rate.tokens_per_second > 0
    assert len(asked) == 3
    assert len({json.dumps(body) for body in asked}) == 3


def test_the_first_token_is_the_first_event_with_text() -> None:
    """It lies within the time of the whole answer, and streams are asked for as such."""
    with fake_server() as (port, asked):
        assert first_token_seconds(port, ONE_REQUEST) > 0
    assert all(body["stream"] for body in asked)


def test_answers_that_are_too_short_are_no_measurement() -> None:
    """They would flatter whoever gives them."""
    with fake_server(limit=2) as (port, _), pytest.raises(ValueError, match=r"answers of 2\.0 tokens"):
        http_loads.measure(port, ONE_REQUEST)


def test_the_model_of_both_servers_does_not_end_by_itself(tmp_path: Path) -> None:
    """Its end token is one that the policy never draws; the shipped files are not touched."""
    tokenizer = ChatTokenizer.from_directory(write_model(EMBEDDED, tmp_path / "model"))
    assert tokenizer.eos_ids == {0}
    assert "<|im_start|>assistant" in "".join(
        tokenizer.token_text(token) for token in tokenizer.render_chat([{"role": "user", "content": "1 + 1"}])
    )


@pytest.mark.parametrize("path", ["mailbox", "actor", "compute thread"])
def test_both_kinds_of_messages_arrive(path: str) -> None:
    """Every message, whatever carries it."""
    case = {"path": path, "capacity": 2, "messages": 20}
    for contender in (clotho_messages, asyncio_messages):
        assert contender.prepare(case)()["message_seconds"] > 0


def test_calls_to_the_compute_thread_need_fewer_messages() -> None:
    """Every path is a case, and every bounded one has both capacities."""
    found = [(case["path"], case["capacity"], case["messages"]) for case in actors_overhead.cases(100)]
    assert found == [
        ("mailbox", 1, 100),
        ("mailbox", 16, 100),
        ("actor", 1, 100),
        ("actor", 16, 100),
        ("compute thread", 1, 20),
    ]


def test_a_swap_is_measured_between_ticks_of_rows_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repeat begins with an engine that has none."""
    monkeypatch.setattr(clotho_swap, "SWAPS", 3)
    once = clotho_swap.prepare({"model": EMBEDDED, "weights": "lora"})
    for _ in range(2):
        metrics = once()
        assert 0 < metrics["swap_seconds"] <= metrics["longest_swap_seconds"]


def test_a_command_is_timed_from_start_to_end_with_its_own_processor_time() -> None:
    """What fails is no measurement."""
    metrics = commands.run(["-c", "sum(range(10_000))"])
    assert metrics["cpu_seconds"] > 0
    assert metrics["seconds"] > 0
    with pytest.raises(RuntimeError, match="exit status 3"):
        commands.run(["-c", "raise SystemExit(3)"])


def test_the_first_update_ends_with_its_line_and_the_sampling_when_learning_began(tmp_path: Path) -> None:
    """The file's own time says when it was written."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"train_seconds": 0.5}\n')
    os.utime(metrics, (1_007.0, 1_007.0))
    assert startup.firsts(metrics, began=1_000.0) == startup.Firsts(sampled=6.5, updated=7.0)


def test_swaps_of_runs_are_told_by_their_median_and_their_longest() -> None:
    """One value per run; updates that no swap has followed yet do not count."""
    swaps = swap.swap_seconds(record({"swap_seconds": None}, {"swap_seconds": 1.0}, {"swap_seconds": 3.0}))
    assert swaps == [1.0, 3.0]
    median, longest = swap.of_runs([swaps, [2.0]])
    assert (median.values, longest.values) == ([2.0, 2.0], [3.0, 2.0])


def test_what_is_kept_of_the_rate_is_read_off_the_last_update() -> None:
    """A run that never decoded beside an update has no such rate."""
    last = {"decode_rate_idle": 4_000.0, "decode_rate_learning": 3_000.0}
    found = overlap.rates(record({"decode_rate_idle": None, "decode_rate_learning": None}, last))
    assert found == {"idle": 4_000.0, "learning": 3_000.0, "kept": 0.75}
    with pytest.raises(ValueError, match="no rate to compare"):
        overlap.rates(record({"decode_rate_idle": 4_000.0, "decode_rate_learning": None}))


def test_results_of_runs_are_kept_and_make_a_table(tmp_path: Path) -> None:
    """As all measurements are."""
    results = [*overlap.of_runs(0.7, [{"idle": 4.0, "learning": 3.0, "kept": 0.75}])]
    write(tmp_path / "overlap.jsonl", results)
    assert overlap.read(tmp_path / "overlap.jsonl") == results
    assert "| embedded, a run of local-m3 | 0.7 |" in overlap.table(results)
    (sampled, updated) = startup.of_runs([startup.Firsts(6.5, 7.0)])
    assert (sampled.values, updated.values) == ([6.5], [7.0])


def test_every_question_says_how_it_is_asked() -> None:
    """Its program's name is its own."""
    for question in (actors_overhead, http, overlap, startup, swap):
        assert f"python -m bench {question.NAME}" == question.COMMAND
        assert question.COMMAND in (question.__doc__ or "")


def test_a_message_that_is_lost_is_an_error() -> None:
    """The time of what did not happen is not reported."""

    async def short() -> None:
        queue: asyncio_messages.Queue = asyncio.Queue()
        await asyncio_messages.send(queue, 2)
        await asyncio_messages.drain(queue, 3)

    with pytest.raises(RuntimeError, match="2 came, not 3"):
        asyncio.run(short())
