"""`python pipeline.py serve`: a model behind the HTTP API, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from msgspec import Struct

from tests.e2e.pipeline_process import PATIENCE_SECONDS, REPOSITORY

EMBEDDED = str(REPOSITORY / "profiles" / "embedded")


class Server(Struct, frozen=True, kw_only=True):
    """A running server. screen: the lines of its start-up screen."""

    process: subprocess.Popen[str]
    screen: list[str]
    url: str


def launch(*flags: str) -> subprocess.Popen[str]:
    """Start `pipeline.py serve` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "pipeline.py", "serve", *flags],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """Serve the embedded model until the block ends."""
    process = launch("--model", EMBEDDED, "--server.port", "0", *flags)
    watch = threading.Timer(PATIENCE_SECONDS, process.kill)
    watch.start()
    try:
        assert process.stdout is not None
        screen: list[str] = []
        for line in process.stdout:
            screen.append(line.strip())
            if line.startswith("API"):
                break
        assert screen, process.communicate()
        yield Server(process=process, screen=screen, url=screen[-1].split()[1])
    finally:
        watch.cancel()
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end; return exit status, output and errors."""
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out, err


def test_a_server_answers_by_every_name_of_its_model_and_drains() -> None:
    """Running requests finish after SIGTERM, and the exit status is 0."""
    with serving("--sampling.max-tokens", "8") as server:
        assert [line.split()[0] for line in server.screen] == ["machine", "compute", "model", "serves", "API"]
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            cards = client.models.list().data
            assert [card.id for card in cards] == [os.path.join("profiles", "embedded")]
            question = [{"role": "user", "content": "What is 2 + 3?"}]
            for name in (cards[0].id, EMBEDDED, "policy"):
                answer = client.chat.completions.create(model=name, messages=question, temperature=0)  # type: ignore[arg-type]
                assert answer.model == cards[0].id
                assert answer.choices[0].message.content
            for name in ("../../etc/passwd", "/etc", "other/model", "profiles/../profiles/embedded"):
                with pytest.raises(openai.NotFoundError) as refusal:
                    client.completions.create(model=name, prompt="x")
                assert refusal.value.param == "model"
            stream = client.completions.create(
                model="policy", prompt="1, 2,", max_tokens=400, extra_body={"ignore_eos": True}, stream=True
            )
            next(iter(stream))
            server.process.send_signal(signal.SIGTERM)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        status, _, err = finish(server.process)
        assert (status, err) == (0, "")


def test_a_served_model_has_the_metrics_of_a_run() -> None:
    """/metrics, /health and /version, behind the API key."""
    with serving("--server.api-key", "secret") as server:
        base = server.url.removesuffix("/v1")
        assert httpx.get(f"{base}/health").json()["status"] == "ok"
        assert httpx.get(f"{base}/metrics").status_code == 401
        found = httpx.get(f"{base}/metrics", headers={"authorization": "Bearer secret"}).text
        assert "clotho_decode_steps_total" in found
        server.process.send_signal(signal.SIGINT)
        assert finish(server.process)[0] == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "no/such/directory/here"],
        ["--model", str(REPOSITORY / "docs")],
        ["--model", EMBEDDED, "--steps", "3"],
        ["--model", EMBEDDED, "--server.host", "0.0.0.0"],
        [],
    ],
    ids=lambda flags: " ".join(flags[-2:]),
)
def test_wrong_input_is_one_line_and_status_2(flags: list[str]) -> None:
    """Nothing is printed to standard output."""
    status, out, err = finish(launch(*flags, "--server.port", "0"))
    assert status == 2
    assert out == ""
    assert err.startswith("clotho: ")
    assert len(err.splitlines()) == 1


def test_a_port_in_use_is_refused() -> None:
    """The message names the flag."""
    with serving() as server:
        port = server.url.split(":")[-1].removesuffix("/v1")
        status, _, err = finish(launch("--model", EMBEDDED, "--server.port", port))
        assert status == 2
        assert "--server.port" in err
