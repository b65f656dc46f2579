"""The OpenAI-compatible server of a sampler, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Self

import anyio
from prometheus_client.core import Metric

from clotho.engine_metrics import engine_metrics
from clotho.library import DEFAULT, settings
from clotho.sampler import Sampler
from clotho.serving.server import ApiServer, base_url, listen
from clotho.serving.services import HealthReport, ServedModel, ServerContext
from clotho.settings.server import HttpServer
from protocols.errors import as_exception


class Server:
    """A server that runs until `close`, or until the end of its `with` block. url: its address, without a path."""

    def __init__(self, context: ServerContext) -> None:
        """Listen, and return when requests are answered. Raises ServerError if the address cannot be bound."""
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        listener = listen(context.settings)
        self.url = base_url(listener)
        api = ApiServer(context, listener=listener)
        self._thread = threading.Thread(target=self._run, args=(api,), name="clotho server", daemon=True)
        self._thread.start()
        self._loop, self._ended = self._ready.result()

    def _run(self, api: ApiServer) -> None:
        try:
            asyncio.run(self._serve(api))
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(as_exception(error))

    async def _serve(self, api: ApiServer) -> None:
        ended = asyncio.Event()
        async with anyio.create_task_group() as tasks:
            await tasks.start(api.run)
            self._ready.set_result((asyncio.get_running_loop(), ended))
            await ended.wait()
            tasks.cancel_scope.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Admit no more requests, let running ones finish for up to ten seconds, and end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()


def serve(
    sampler: Sampler,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str = "",
    model_name: str = "policy",
) -> Server:
    """Serve what a sampler samples from, with the API of OpenAI, and return the running server.

    Its requests are decoded together with the sampler's own, and each answer names the version of its weights; see
    docs/http-api.md. Close the server before the sampler. port: 0 takes a free one; `server.url` has it. api_key:
    required of clients, and for a host that other machines reach.
    Raises ServerError if the address cannot be bound, and ProfileError for a setting that is not valid.
    """
    section = settings(
        "server", HttpServer, {"type": "http", "host": host, "port": port, "api_key": api_key, "model_name": model_name}
    )
    policy = sampler.policy
    model = ServedModel(id=model_name, root=str(policy.files or model_name), weights=lambda: sampler.served)
    return Server(
        ServerContext(
            sampler=sampler.new_client(),
            tokenizer=policy.tokenizer,
            settings=section,
            sampling=DEFAULT,
            prompt_logprobs=lambda tokens, top, source: sampler.prompt_logprobs(tokens, top=top, weights=source),
            weights=lambda: sampler.served,
            models=lambda: (model,),
            health=lambda: HealthReport(status="ok"),
            context_length=policy.context_length,
            vocab_size=policy.vocab_size,
            measure=partial(_metrics, sampler, model_name),
        )
    )


def _metrics(sampler: Sampler, model: str, timed_out: Mapping[str, int]) -> Iterator[Metric]:
    stats, turns = sampler.engine.stats(), sampler.compute.arbiter.turn_times()
    tokens = sampler.settings.kv_cache_tokens
    return engine_metrics(stats, turns, kv_cache_tokens=tokens, model=model, timed_out=timed_out)
