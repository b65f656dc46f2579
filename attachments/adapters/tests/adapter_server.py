"""An engine with adapters, its compute thread, and an HTTP server that loads adapters for clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
from msgspec.structs import replace

from attachments.adapters.adapters import AdapterRegistry
from attachments.adapters.tests.adapter_models import write_mlx_adapter
from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute, finish
from clotho.lanes.sampling_client import EngineSampler
from clotho.serving.server import ApiServer
from clotho.serving.services import EngineAccess, HealthReport, ServedModel, ServerContext
from clotho.settings.engine import EngineSection
from clotho.settings.server import AdaptersSection
from protocols.sampling import PromptLogprobs, SampleRequest, Sampling
from protocols.step import WeightsReady
from tests.serving.running_server import HTTP_SERVER
from tests.small_models import tiny, tiny_source


def write_root(directory: Path) -> Path:
    """Write adapters below `root`, and one beside it; return the root."""
    model = tiny("qwen3", vocab_size=257)
    write_mlx_adapter(directory / "outside", model, seed=9)
    write_mlx_adapter(directory / "root" / "a", model, rank=4, seed=1)
    write_mlx_adapter(directory / "root" / "nested" / "b", model, rank=8, seed=2)
    return directory / "root"


def base_weights() -> WeightsReady:
    """Return the version of the base model."""
    return WeightsReady(version=0, step=0, fingerprint="base")


MODEL = ServedModel(id="models/base", aliases=frozenset({"policy"}), root="models/base", weights=base_weights)


class Served:
    """An engine with its compute thread, and a registry of adapters below a root."""

    def __init__(self, root: str, limits: AdaptersSection, **settings: Any) -> None:
        """settings: further keys of [server]."""
        self.compute = Compute(decode_share=0.5, slots=2)
        self.compute.start()
        source = self.compute.decode.submit(lambda: tiny_source("qwen3")).result()
        self.settings = HTTP_SERVER(port=0, shutdown_seconds=1.0, adapters=replace(limits, root=root), **settings)
        self.source = source
        self.engine = self.compute.decode.submit(lambda: DecodeEngine(source, EngineSection(), limits)).result()
        self.compute.decode.attach(self.engine)
        self.sampler = EngineSampler(self.compute.decode.submit, self.engine)
        self.server = ApiServer(self._context())
        (registry,) = self.server.parts.sources
        assert isinstance(registry, AdapterRegistry)
        self.registry = registry

    async def sample(self, weights: str, seed: int = 0) -> tuple[int, ...]:
        """Return the tokens of a completion."""
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        request = SampleRequest(prompt=(1, 2, 3), sampling=sampling, seeds=(seed,), weights=weights)
        return (await self.sampler.complete(request))[0].tokens

    async def _score(self, _: tuple[int, ...], __: int, source: str) -> PromptLogprobs:
        """Refuse an unknown adapter; prompts are not scored."""
        await finish(self.compute.decode.submit(lambda: self.engine.row_weights.admit(source)))
        raise NotImplementedError

    def _context(self) -> ServerContext:
        return ServerContext(
            models=lambda: (MODEL,),
            engine=EngineAccess(submit=self.compute.decode.submit, engine=self.engine),
            base_model=MODEL.id,
            sampler=self.sampler,
            tokenizer=self.source.tokenizer,
            settings=self.settings,
            sampling=Sampling(max_tokens=16),
            prompt_logprobs=self._score,
            weights=base_weights,
            health=lambda: HealthReport(status="ok"),
            context_length=self.source.context_length,
            vocab_size=self.source.vocab_size,
        )


@asynccontextmanager
async def serving_adapters(root: str, limits: AdaptersSection) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """Serve adapters below a root over HTTP."""
    served = Served(root, limits)
    try:
        async with anyio.create_task_group() as tasks:
            url = await tasks.start(served.server.run)
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                yield served, client
            tasks.cancel_scope.cancel()
    finally:
        served.compute.stop()
