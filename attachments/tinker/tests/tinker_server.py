"""A server with Tinker's API in a thread of this process, and a client that speaks JSON."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from attachments.tinker.routes import TinkerRoutes
from attachments.tinker.service import TinkerService
from clotho.lanes.compute_thread import Compute
from clotho.serving.server import ApiServer
from protocols.step import WeightsReady
from training_run.commands.serve import Serving, load, served_base
from training_run.profile.command_profiles import load_serving
from training_run.serving import ServingState
from training_run.supervision.latest import Latest

PREFIX = "/api/v1"
ROOT = Path(__file__).parents[3]


class Live:
    """A server that answers. service: its state, which belongs to its event loop."""

    def __init__(self) -> None:
        self.url = ""
        self.server: ApiServer
        self._ready, self._ending = threading.Event(), anyio.Event()
        self._failure: list[BaseException] = []
        self._stop: Any = None
        self._clients: list[Client] = []

    def client(self, key: str = "tml-test") -> Client:
        """Return a program with a session of its own, whose connections end with the server."""
        self._clients.append(Client(self.url, key))
        return self._clients[-1]

    @property
    def service(self) -> TinkerService:
        """The state of the API."""
        routes = next(one.handle for one in self.server.parts.endpoints if one.path == f"{PREFIX}/asample")
        loaded = routes.func.__self__.loaded  # type: ignore[attr-defined]
        assert isinstance(loaded, TinkerRoutes)
        return loaded.service

    def run(self, arguments: Sequence[str]) -> None:
        """Serve until `stop`."""
        try:
            anyio.run(self._serve, arguments)
        except BaseException as error:
            self._failure.append(error)
        self._ready.set()

    async def _serve(self, given: Sequence[str]) -> None:
        arguments = load_serving([*given, "--server.port", "0"])
        compute = Compute(decode_share=0.5, slots=2)
        compute.start()
        try:
            sampler = await load(arguments, compute)
            weights = Latest[WeightsReady]("weights")
            weights.put(sampler.served)
            state = ServingState(sampler, children=dict)
            model = served_base(arguments, sampler.policy, weights)
            serving = Serving(arguments=arguments, sampler=sampler, model=model, weights=weights)
            self.server = ApiServer(serving.server_context(state))
            async with anyio.create_task_group() as tasks:
                self.url = await tasks.start(self.server.run)
                stopped = anyio.Event()
                loop_call = anyio.from_thread.BlockingPortal()
                async with loop_call:
                    self._stop = lambda: loop_call.call(stopped.set)
                    self.call = loop_call.call
                    self._ready.set()
                    await stopped.wait()
                tasks.cancel_scope.cancel()
        finally:
            compute.stop()

    def started(self) -> None:
        """Wait until it answers; raise what ended it."""
        self._ready.wait()
        if self._failure:
            raise self._failure[0]

    def stop(self) -> None:
        """Stop it."""
        for client in self._clients:
            client.http.close()
        self._stop()


@contextmanager
def tinker_server(model: Path, directory: Path, *flags: str) -> Iterator[Live]:
    """Serve a model; `directory` keeps what clients save."""
    live = Live()
    arguments = ("--model", str(model), "--server.tinker", "on", "--server.tinker.directory", str(directory), *flags)
    thread = threading.Thread(target=live.run, args=(arguments,))
    thread.start()
    try:
        live.started()
        try:
            yield live
        finally:
            live.stop()
    finally:
        thread.join()


@contextmanager
def process(model: Path, directory: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve in a process of its own, with further flags; yields it and its address."""
    command = [
        sys.executable, str(ROOT / "pipeline.py"), "serve", "--model", str(model), "--server.port", "0",
        "--server.tinker", "on", "--server.tinker.directory", str(directory / "saved"), *flags,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory) as running:
        try:
            assert running.stdout is not None
            line = next(one for one in running.stdout if one.startswith("API"))
            yield running, line.split()[-1].removesuffix("/v1")
        finally:
            running.kill()


class Client:
    """One program of a user, which begins a session."""

    def __init__(self, url: str, key: str = "tml-test") -> None:
        self.http = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=60)
        self.session = str(self.post("create_session", sdk_version="test", tags=[], user_metadata=None)["session_id"])
        self._models = self._samplers = 0

    def respond(self, path: str, /, **body: Any) -> httpx.Response:
        """Post a body."""
        return self.http.post(f"{PREFIX}/{path}", json=body)

    def post(self, path: str, /, **body: Any) -> dict[str, Any]:
        """Post a body, and return the answer of a request that is accepted."""
        answer = self.respond(path, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def get(self, path: str) -> dict[str, Any]:
        """Return what a path shows."""
        answer = self.http.get(f"{PREFIX}/{path}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def result(self, path: str, /, **body: Any) -> dict[str, Any]:
        """Post a body, and return the result of its promise."""
        promise = self.post(path, **body)
        while True:
            answer = self.respond("retrieve_future", request_id=promise["request_id"])
            if answer.status_code != 408:
                assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
                found: dict[str, Any] = answer.json()
                return found

    def model(self, base: str, *, rank: int = 4, seed: int = 0, **lora: Any) -> str:
        """Create a model."""
        self._models += 1
        lora_config = {"rank": rank, "seed": seed, **lora}
        found = self.result(
            "create_model", session_id=self.session, model_seq_id=self._models, base_model=base, lora_config=lora_config
        )
        return str(found["model_id"])

    def sampler(self, model_id: str, kind: str = "snapshot") -> str:
        """Create a sampling session of a model's present weights."""
        self._samplers += 1
        number = self._samplers
        found = self.result("save_weights_for_sampler", model_id=model_id, sampling_session_seq_id=number, kind=kind)
        return str(found["sampling_session_id"])

    def gradient(
        self, model_id: str, data: Sequence[Any], loss: str = "cross_entropy", **config: float
    ) -> dict[str, Any]:
        """Compute a gradient."""
        given = {"data": list(data), "loss_fn": loss, "loss_fn_config": config or None}
        return self.result("forward_backward", model_id=model_id, forward_backward_input=given)

    def forward(self, model_id: str, data: Sequence[Any], loss: str = "cross_entropy") -> dict[str, Any]:
        """Compute log-probabilities."""
        return self.result("forward", model_id=model_id, forward_input={"data": list(data), "loss_fn": loss})

    def step(self, model_id: str, **adam: float) -> dict[str, float]:
        """Take a step, and return its metrics."""
        found: dict[str, float] = self.result("optim_step", model_id=model_id, adam_params=adam)["metrics"]
        return found

    def sample(self, sampler: str, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Sample. Settings of sampling are those of `sampling_params`."""
        names = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
        params = {name: fields.pop(name) for name in names if name in fields}
        return self.result(
            "asample", sampling_session_id=sampler, prompt=chunks(prompt), sampling_params=params, **fields
        )


def chunks(tokens: Sequence[int]) -> dict[str, Any]:
    """Return tokens as an input."""
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> dict[str, Any]:
    """Return a sequence with its next tokens as targets. inputs: of the loss."""
    values = {name: {"data": list(one), "dtype": "float32"} for name, one in inputs.items()}
    targets = {"data": list(tokens[1:]), "dtype": "int64"}
    return {"model_input": chunks(tokens[:-1]), "loss_fn_inputs": {"target_tokens": targets, **values}}


def logprobs_of(result: dict[str, Any]) -> list[list[float]]:
    """Return the log-probabilities of each sequence of a result."""
    return [row["logprobs"]["data"] for row in result["loss_fn_outputs"]]
