"""The HTTP API of a run without training, for the trace of a chat request.

Built from the parts of a run: compute thread, policy, engine, sampler and HTTP server.
"""

from __future__ import annotations

import anyio

from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute
from clotho.lanes.sampling_client import EngineSampler
from clotho.models.policy import Policy, load_policy
from clotho.serving.server import ApiServer
from clotho.serving.services import HealthReport, ServedModel, ServerContext
from clotho.settings.engine import EngineSection
from clotho.settings.model import FullMethod, ModelSection, PolicySection
from clotho.settings.server import HttpServer
from protocols.sampling import PromptLogprobs, Sampling
from protocols.step import WeightsReady


def assemble(model: str) -> tuple[Policy, DecodeEngine]:
    """The policy with all weights trainable, so that no adapter is computed, and an engine for it."""
    policy = load_policy(ModelSection(path=model), PolicySection(method=FullMethod()), seed=0, keep_reference=False)
    return policy, DecodeEngine(policy, EngineSection())


def services(policy: Policy, engine: DecodeEngine, compute: Compute, port: int) -> ServerContext:
    """Return the server context of a run."""

    def weights() -> WeightsReady:
        return WeightsReady(version=0, step=0, fingerprint=policy.fingerprint)

    return ServerContext(
        sampler=EngineSampler(compute.decode.submit, engine),
        tokenizer=policy.tokenizer,
        settings=HttpServer(port=port),
        sampling=Sampling(max_tokens=64),
        prompt_logprobs=_refuse,
        weights=weights,
        models=lambda: (ServedModel(id="policy", root="policy", weights=weights),),
        health=lambda: HealthReport(status="ok"),
        context_length=policy.context_length,
        vocab_size=policy.vocab_size,
    )


async def _refuse(_: tuple[int, ...], __: int, ___: str) -> PromptLogprobs:
    raise NotImplementedError("no client of this server asks for them")


def serve(model: str, port: int) -> None:
    """Serve the model of a directory until the process ends."""
    compute = Compute(decode_share=0.5, slots=2)
    compute.start()
    policy, engine = compute.decode.submit(lambda: assemble(model)).result()
    compute.decode.attach(engine)
    anyio.run(ApiServer(services(policy, engine, compute, port)).run)
