"""`python pipeline.py serve`: a model behind the HTTP API, in a process of its own; bad input in this process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import mlx.core as mx
import mlx_lm
import openai
import pytest
from mlx_lm.generate import generate_step
from msgspec import Struct
from openai import BaseModel
from pydantic import ConfigDict, Field

from attachments.adapters.tests.adapter_models import write_mlx_adapter
from tests.e2e.pipeline_process import PATIENCE_SECONDS, REPOSITORY
from training_run.__main__ import main

KEY = "secret"
EMBEDDED = str(REPOSITORY / "profiles" / "embedded")


class Server(Struct, frozen=True, kw_only=True):
    """A running server. screen: the lines of its start-up screen."""

    process: subprocess.Popen[str]
    screen: list[str]
    url: str


def launch(*flags: str, program: Sequence[str] = ("pipeline.py",)) -> subprocess.Popen[str]:
    """Start `pipeline.py serve`, or the command of another program, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *program, "serve", *flags],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@contextmanager
def serving(
    *flags: str, program: Sequence[str] = ("pipeline.py",), patience_seconds: float = PATIENCE_SECONDS
) -> Iterator[Server]:
    """Serve the embedded model until the block ends."""
    process = launch("--model", EMBEDDED, "--server.port", "0", *flags, program=program)
    watch = threading.Timer(patience_seconds, process.kill)
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


HANGING = """
import ctypes, sys
from clotho.process import load_blas
load_blas()
from clotho.inference.engine import DecodeEngine

def hang(engine):
    print("hanging", flush=True)
    ctypes.CDLL(None).sleep(3600)

DecodeEngine.tick = hang
from training_run.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_the_second_signal_ends_a_server_whose_computation_hangs() -> None:
    """The process abandons the computation and its request."""
    with serving("--server.shutdown-seconds", "0.2", program=("-c", HANGING)) as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        body = b'{"prompt": "x"}'
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        with socket.create_connection((host, int(port))) as client:
            client.sendall("\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + body)
            assert server.process.stdout is not None
            for line in ("hanging", "draining"):
                assert any(line in printed for printed in server.process.stdout)
                server.process.send_signal(signal.SIGTERM)
            status, out, err = finish(server.process)
    assert (status, err) == (128 + signal.SIGTERM, "")
    assert "computation_abandoned" in out


class AdapterServer(Struct, frozen=True, kw_only=True):
    """A running server with an API key and two adapters, by name."""

    server: Server
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def with_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterServer]:
    """A server with an API key and two adapters. A stream ends after SIGTERM, and the exit status is 0."""
    place = tmp_path_factory.mktemp("adapters")
    mx.random.seed(0)
    model: Any = mlx_lm.load(EMBEDDED)[0]
    adapters = {
        "first": write_mlx_adapter(place / "first", model, rank=4, seed=1, modules=("q_proj", "v_proj")),
        "second": write_mlx_adapter(place / "second", model, rank=8, seed=2),
    }
    flags = [word for name, path in adapters.items() for word in ("--adapter", f"{name}={path}")]
    flags += ["--server.api-key", KEY, "--server.model-name", "base", "--sampling.max-tokens", "8"]
    flags += ["--server.shutdown-seconds", str(PATIENCE_SECONDS)]
    with serving(*flags) as server:
        yield AdapterServer(server=server, adapters=adapters)
        with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
            stream = client.completions.create(
                model="base", prompt="1, 2,", max_tokens=400, extra_body={"ignore_eos": True}, stream=True
            )
            next(iter(stream))
            server.process.send_signal(signal.SIGTERM)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        status, _, err = finish(server.process)
        assert (status, err) == (0, "")


def test_a_server_answers_by_every_name_of_its_model(with_adapters: AdapterServer) -> None:
    """By the name of the flag and by its path; an unknown name is not found, also as a path."""
    server = with_adapters.server
    screen = [line.split()[0] for line in server.screen]
    assert screen == ["loading", "machine", "compute", "model", "serves", "API"]
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        question = [{"role": "user", "content": "What is 2 + 3?"}]
        for name in ("base", EMBEDDED):
            answer = client.chat.completions.create(model=name, messages=question, temperature=0)  # type: ignore[arg-type]
            assert answer.model == "base"
            assert answer.choices[0].message.content
        for name in ("../../etc/passwd", "/etc", "other/model", "profiles/../profiles/embedded"):
            with pytest.raises(openai.NotFoundError) as refusal:
                client.completions.create(model=name, prompt="x")
            assert refusal.value.param == "model"


def test_a_served_model_has_the_metrics_of_a_run(with_adapters: AdapterServer) -> None:
    """/metrics, /health and /version, behind the API key; the model has the name that the flag gives it."""
    base = with_adapters.server.url.removesuffix("/v1")
    health = httpx.get(f"{base}/health").json()
    assert (health["status"], health["children"]["memory watch"]) == ("ok", "running")
    assert health["model"] == "base"
    assert httpx.get(f"{base}/metrics").status_code == 401
    found = httpx.get(f"{base}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    assert "clotho_decode_steps_total" in found
    assert "clotho_sequences_limit 256.0" in found


def test_requests_name_adapters_that_the_server_loaded_at_its_start(with_adapters: AdapterServer) -> None:
    """Each has the base model as its parent, and samples as mlx-lm does with the adapter."""
    prompt, server = [5, 9, 33, 1], with_adapters.server
    assert server.screen[-2].split() == ["serves", "base,", "first,", "second"]
    with openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0) as client:
        base, *adapters = client.models.list().data
        assert (base.id, extra(base)["root"]) == ("base", os.path.join("profiles", "embedded"))
        assert client.models.retrieve(extra(base)["root"]).id == "base"
        parents = [(card.id, extra(card)["parent"]) for card in adapters]
        assert parents == [("first", base.id), ("second", base.id)]
        for name in (base.id, "first", "second"):
            path = with_adapters.adapters.get(name)
            answer = client.completions.create(
                model=name, prompt=prompt, max_tokens=12, temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True, "prompt_logprobs": 0},
            )  # fmt: skip
            assert answer.model == name
            (choice,) = answer.choices
            assert extra(choice)["token_ids"] == greedy(path, prompt, 12)
            scores = extra(choice)["prompt_logprobs"]
            found = [next(iter(position.values()))["logprob"] for position in scores[1:]]
            assert found == pytest.approx(scored(path, prompt), abs=1e-3)


class City(BaseModel):
    """A schema, as users of the client write it."""

    name: Annotated[str, Field(max_length=8)]
    people: Annotated[int, Field(ge=0, le=999)]
    model_config = ConfigDict(extra="forbid")


def test_the_client_of_openai_uses_every_api_of_a_model_without_tools(with_adapters: AdapterServer) -> None:
    """Text, streams, schemas and required calls, in chat completions and in responses; with an adapter too."""
    city: Any = openai.pydantic_function_tool(City)
    tools: dict[str, Any] = {"tools": [city], "tool_choice": "required", "parallel_tool_calls": False}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 128, "temperature": 0}
    item: dict[str, Any] = {"input": "2 + 3?", "max_output_tokens": 128, "temperature": 0}
    with openai.OpenAI(base_url=with_adapters.server.url, api_key=KEY, max_retries=0) as client:
        for model in ("base", "first"):
            said: Any = client.chat.completions.create(model=model, **chat).choices[0].message.content
            assert said == client.responses.create(model=model, **item).output_text
            with client.responses.stream(model=model, **item) as stream:
                assert said == "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            assert client.chat.completions.parse(model=model, response_format=City, **chat).choices[0].message.parsed
            assert client.responses.parse(model=model, text_format=City, **item).output_parsed
            (call,) = client.chat.completions.parse(model=model, **tools, **chat).choices[0].message.tool_calls or []
            same: Any = client.responses.parse(model=model, **tools, **item).output[0]
            assert call.function.parsed_arguments == same.parsed_arguments
            assert isinstance(call.function.parsed_arguments, City)


def extra(answer: BaseModel) -> dict[str, Any]:
    """Return the fields that the OpenAI API does not have."""
    assert answer.model_extra is not None
    return answer.model_extra


def adapted(adapter: Path | None) -> Any:
    """Return the embedded model with an adapter, as mlx-lm loads it."""
    loaded: Any = mlx_lm.load(EMBEDDED, adapter_path=None if adapter is None else str(adapter))
    return loaded[0]


def greedy(adapter: Path | None, prompt: list[int], count: int) -> list[int]:
    """Return what mlx-lm generates."""
    steps = generate_step(mx.array(prompt), adapted(adapter), max_tokens=count)
    return [int(token) for token, _ in steps]


def scored(adapter: Path | None, prompt: list[int]) -> list[float]:
    """Return the log-probabilities of a prompt, computed with mlx-lm's model."""
    logits = adapted(adapter)(mx.array([prompt]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [float(logprobs[index, token].item()) for index, token in enumerate(prompt[1:])]


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "no/such/directory/here"],
        ["--model", str(REPOSITORY / "docs")],
        ["--model", EMBEDDED, "--steps", "3"],
        ["--model", EMBEDDED, "--server.host", "0.0.0.0"],
        ["--model", EMBEDDED, "--adapter", "a=/no/such/adapter"],
        ["--model", EMBEDDED, "--adapter", "policy=/no/such/adapter"],
        [],
    ],
    ids=lambda flags: " ".join(flags[-2:]),
)
def test_wrong_input_is_one_line_and_status_2(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output has at most the line that says what is being loaded."""
    status = main(["serve", *flags, "--server.port", "0"])
    out, err = capfd.readouterr()
    assert status == 2
    assert out.startswith("loading ") * out == out
    assert err.startswith("clotho: ")
    assert len(err.splitlines()) == 1


def test_a_port_in_use_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """The message names the flag."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", "--model", EMBEDDED, "--server.port", str(other.getsockname()[1])]) == 2
    assert "--server.port" in capfd.readouterr().err
