"""A server of mlx-lm that the run starts, and restarts with each new adapter: it cannot replace its weights.

`mlx_lm.server` has one completion per request, prompts as text, and the log-probabilities of the model's distribution
at temperature 1, which `training_run.profile.rules` therefore requires. It does not report its weights: the run knows
them, because it started the process with them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import anyio
import httpx
import msgspec
import structlog
from anyio.abc import Process
from anyio.to_thread import run_sync
from msgspec import Meta, Struct, structs

from attachments.remote.messages import RolloutAnswer, ServedPolicy
from attachments.remote.server import CONNECT_SECONDS, STATE_SECONDS, RemoteFailure, Traffic, server_address
from attachments.remote.weights import Weights
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.server import is_loopback
from clotho.storage.adapters import write_adapter
from protocols.checkpoint import AdapterConfig
from protocols.errors import ProfileError, RequestError, visible
from protocols.sampling import Completion, SampleRequest
from training_run.supervision.child_process import end_child, start_child

log = structlog.get_logger(actor="remote_sampler")

START = (
    sys.executable,
    "-c",
    "import socketserver; socketserver.TCPServer.request_queue_size = 1024; from mlx_lm.server import main; main()",
)
"""The command `mlx_lm.server` with a longer queue of connections: with five, it resets those of a group."""

POLL_SECONDS, ERROR_BYTES = 0.05, 4096
"""Pause between two attempts to reach a started server, and the part of its output that an error is taken from."""


class _Token(Struct, frozen=True, kw_only=True):
    id: Annotated[int, Meta(ge=0, lt=2**31)]
    logprob: float


class _Logprobs(Struct, frozen=True, kw_only=True):
    content: list[_Token]


class _Choice(Struct, frozen=True, kw_only=True):
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: _Logprobs


class _Answer(Struct, frozen=True, kw_only=True):
    """The part of a response of /v1/completions that this module uses."""

    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=1)]


class MlxServer:
    """One `mlx_lm.server`. Every method but `close` raises RemoteFailure if the server fails.

    name: the address, for logs.
    """

    restarts = True

    def __init__(
        self,
        url: str,
        *,
        model: Path,
        tokenizer: ChatTokenizer,
        loadable: Callable[[object], Awaitable[tuple[object, AdapterConfig]]],
        unstarted: ServedPolicy,
        directory: Path,
        concurrency: int,
        start_seconds: float,
        timeout_seconds: float,
        options: Sequence[str] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """model: the base model. loadable: returns parameters in the form that mlx-lm loads.

        unstarted: the policy of a server that has not been started. directory: for the adapter and the output.
        concurrency: completions that are decoded at once. start_seconds: time in which a started server must answer.
        timeout_seconds: time for one group. options: further options of the server. transport: for tests.
        Raises ProfileError if `url` is not a loopback address with a port.
        """
        address = server_address(url)
        if address.scheme != "http" or address.port is None or not is_loopback(address.host):
            raise ProfileError(
                f"generator.server_url: {visible(url, 200)} must be a loopback address with a port, such as "
                "http://127.0.0.1:8080, because the run starts this server"
            )
        self.name = str(address.copy_with(username=None, password=None, path="/", query=None)).rstrip("/")
        self.traffic = Traffic()
        self._host, self._port = address.host, address.port
        self._model, self._tokenizer, self._loadable = model, tokenizer, loadable
        self._adapter = directory / f"mlx-lm-{address.port}"
        self._output = directory / f"mlx-lm-{address.port}.log"
        self._options = (*options, "--decode-concurrency", str(concurrency), "--prompt-concurrency", str(concurrency))
        self._start_seconds, self._timeout_seconds = start_seconds, timeout_seconds
        self._served = self._unstarted = unstarted
        self._process: Process | None = None
        self._http = httpx.AsyncClient(
            base_url=self.name,
            transport=transport,
            limits=httpx.Limits(max_connections=concurrency),
            trust_env=False,
        )

    async def served(self) -> ServedPolicy:
        """Return the policy that the process was started with. A process that does not answer is ended."""
        if self._process is None:
            return self._served
        try:
            await self._require_answer(STATE_SECONDS)
        except RemoteFailure:
            await self._end()
            raise
        return self._served

    async def push(self, weights: Weights) -> ServedPolicy:
        """Write the adapter, and start the server with it; a running server is ended first."""
        parameters, config = await self._loadable(weights.parameters)
        await self._end()
        await run_sync(write_adapter, self._adapter, parameters, config)
        await self._require_free_port()
        await self._start()
        ready = weights.ready
        self._served = structs.replace(
            self._unstarted, version=ready.version, step=ready.step, fingerprint=ready.fingerprint
        )
        return self._served

    async def sample(self, request: SampleRequest) -> RolloutAnswer:
        """Return one completion per seed. Seeds are not sent, because the server does not batch requests with seeds.

        Raises RequestError if the text of the prompt is another prompt for the server.
        """
        text = self._text_of(request.prompt)
        served, process = self._served, self._process
        completions, failures = list[Completion](), list[RemoteFailure]()

        async def complete() -> None:
            try:
                choice = await self._complete(text, request)
                completions.append(self._completion(choice, request, served.version))
            except RemoteFailure as failure:
                failures.append(failure)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for _ in request.seeds:
                tasks.start_soon(complete)
        if failures:
            raise failures[0]
        if process is not self._process:
            raise RemoteFailure("was restarted while it sampled")
        return RolloutAnswer(completions=tuple(completions), fingerprints={served.version: served.fingerprint})

    async def close(self) -> None:
        """End the process and close the connections."""
        await self._end()
        await self._http.aclose()

    def _text_of(self, prompt: tuple[int, ...]) -> str:
        """Return the text that the server encodes as the prompt; it adds the special tokens of the tokenizer."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        added = self._tokenizer.decode(self._tokenizer.encode(""), skip_special_tokens=False)
        for candidate in (text, text.removeprefix(added)):
            if self._tokenizer.encode(candidate) == prompt:
                return candidate
        message = "mlx_lm.server takes text, and the text of this prompt has other tokens"
        raise RequestError(message, param="prompt")

    async def _complete(self, text: str, request: SampleRequest) -> _Choice:
        sampling = request.sampling
        body = {
            "prompt": text,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "logprobs": True,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        }
        timeout = httpx.Timeout(self._timeout_seconds, connect=CONNECT_SECONDS)
        try:
            response = await self._http.post("/v1/completions", json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise RemoteFailure(f"POST /v1/completions: {type(error).__name__}: {visible(str(error), 200)}") from error
        self.traffic.sent += len(response.request.content)
        self.traffic.received += len(response.content)
        if response.status_code != 200:
            detail = visible(response.text, 300)
            raise RemoteFailure(f"POST /v1/completions: status {response.status_code} {detail}".rstrip())
        try:
            return msgspec.json.decode(response.content, type=_Answer).choices[0]
        except (msgspec.MsgspecError, ValueError) as error:
            raise RemoteFailure(f"not a valid response: {visible(str(error), 200)}") from error

    def _completion(self, choice: _Choice, request: SampleRequest, version: int) -> Completion:
        tokens = tuple(token.id for token in choice.logprobs.content)
        logprobs = tuple(token.logprob for token in choice.logprobs.content)
        if not 1 <= len(tokens) <= request.sampling.max_tokens:
            raise RemoteFailure(f"returned a completion of {len(tokens)} tokens")
        is_ended = tokens[-1] in self._tokenizer.eos_ids
        if not is_ended and len(tokens) < request.sampling.max_tokens:
            raise RemoteFailure("ended a completion before an end token")
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            versions=(version,) * len(tokens),
            text=self._tokenizer.decode(tokens[:-1] if is_ended else tokens),
            finish_reason="stop" if is_ended else "length",
        )

    async def _require_free_port(self) -> None:
        try:
            _, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return
        writer.close()
        raise RemoteFailure("another program listens at this address: stop it, because the run starts this server")

    async def _start(self) -> None:
        """Start the process and wait until it answers. Raises RemoteFailure, and ends it, if it does not in time."""
        adapter = ("--adapter-path", str(self._adapter.absolute()))
        address = ("--host", self._host, "--port", str(self._port), "--log-level", "WARNING")
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            command = [*START, "--model", str(self._model), *adapter, *address, *self._options]
            self._process = await start_child(command, output=output)
        finally:
            os.close(output)
        try:
            with anyio.fail_after(self._start_seconds):
                while True:
                    try:
                        return await self._require_answer(STATE_SECONDS)
                    except RemoteFailure:
                        if self._process.returncode is not None:
                            raise RemoteFailure(f"did not start: {self._last_line()}") from None
                    await anyio.sleep(POLL_SECONDS)
        except TimeoutError:
            await self._end()
            raise RemoteFailure(f"did not answer within {self._start_seconds:g} seconds") from None
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._end()
            raise

    async def _require_answer(self, seconds: float) -> None:
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            response = await self._http.get("/health", timeout=timeout)
        except httpx.HTTPError as error:
            raise RemoteFailure(f"GET /health: {type(error).__name__}: {visible(str(error), 200)}") from error
        if response.status_code != 200:
            raise RemoteFailure(f"GET /health: status {response.status_code}: {self._last_line()}")

    def _last_line(self) -> str:
        """Return the last line of the output."""
        with open(self._output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - ERROR_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return visible(lines[-1].strip(), 300) if lines else "it printed nothing"

    async def _end(self) -> None:
        process, self._process, self._served = self._process, None, self._unstarted
        if process is not None:
            await end_child(process)
