"""The engine of a rollout worker: turns of requests, their outcomes, and weights of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_map

from attachments.cluster.messages import (
    EngineWorkerSettings,
    Published,
    RequestFailed,
    RequestRefused,
    Sampled,
    Turn,
    worker_settings,
)
from attachments.cluster.rollout_engine import RolloutEngine
from attachments.remote.messages import RolloutCall
from attachments.remote.weight_patch import make_patch
from clotho.models.parameters import fingerprint
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.model import ModelSection
from clotho.storage.tensors import as_stored, named_arrays, tensor_bytes
from protocols.errors import CheckpointError, ClothoError
from protocols.sampling import SampleRequest, Sampling, completion_seeds
from protocols.step import WeightsReady
from tests.learner_settings import policy_settings
from tests.saved_models import save
from training_run.profile.load import load_profile
from training_run.profile.schema import MemorySection


def small_settings(path: Path) -> EngineWorkerSettings:
    """Return the settings of a worker for a small model."""
    return EngineWorkerSettings(
        model=ModelSection(path=str(path)),
        policy=policy_settings(rank=2, scale=2.0),
        sampling=SamplingSection(max_tokens=6),
        engine=EngineSection(max_num_seqs=16),
        memory=MemorySection(),
        seed=0,
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    """The engine of a worker with a tiny policy."""
    engine = RolloutEngine(small_settings(save(tmp_path_factory.mktemp("worker") / "base")))
    yield engine
    engine.close()


def call(seed: int = 0, *, prompt: tuple[int, ...] = (5, 9, 33), max_tokens: int = 6) -> RolloutCall:
    """Return a call for two completions."""
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
    return RolloutCall.of(SampleRequest(prompt=prompt, sampling=sampling, seeds=completion_seeds(seed, 2)))


def published(version: int, digest: str, *, patched: bool = False) -> Published:
    """Return the description of published weights."""
    ready = WeightsReady(version=version, step=version, fingerprint=digest)
    return Published(ready=ready, run_id="run", patched=patched)


async def test_each_request_of_a_turn_has_an_outcome_of_its_own(engine: RolloutEngine) -> None:
    """A refused request does not concern the others; the completions name version and fingerprint."""
    turn = engine.submit(Turn(calls=(call(1), call(2, prompt=()), call(3))))
    first, refused, last = [await engine.outcome(turn, position) for position in range(3)]
    assert isinstance(first, Sampled)
    assert isinstance(last, Sampled)
    assert isinstance(refused, RequestRefused)
    assert refused.param == "prompt"
    assert [len(completion.tokens) for completion in first.answer.completions] == [6, 6]
    served = engine.served()
    assert last.answer.fingerprints == {served.version: served.fingerprint}


async def test_seeds_determine_the_completions(engine: RolloutEngine) -> None:
    """It does not matter in which turn a group is sampled."""
    turns = [engine.submit(Turn(calls=(call(7),))), engine.submit(Turn(calls=(call(8), call(7))))]
    alone, together = await engine.outcome(turns[0], 0), await engine.outcome(turns[1], 1)
    assert isinstance(alone, Sampled)
    assert isinstance(together, Sampled)
    found = [[completion.tokens for completion in one.answer.completions] for one in (alone, together)]
    assert found[0] == found[1]


async def test_the_outcome_of_an_unknown_turn_is_a_failure(engine: RolloutEngine) -> None:
    """A worker that has restarted knows no turn of its earlier process."""
    assert isinstance(await engine.outcome(10**6, 0), RequestFailed)


async def test_a_turn_without_readers_is_withdrawn(engine: RolloutEngine) -> None:
    """The run has taken back its groups: the turn is forgotten."""
    turn = engine.submit(Turn(calls=(call(4, max_tokens=100),)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.outcome, turn, 0)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert isinstance(await engine.outcome(turn, 0), RequestFailed)


async def test_published_weights_are_served_and_others_change_nothing(engine: RolloutEngine) -> None:
    """The fingerprint of the bytes decides."""
    moved = tree_map(lambda array: array + 0.05, engine.parameters())
    mx.eval(moved)
    tensors, digest = tensor_bytes(named_arrays(moved)), fingerprint(moved)
    before = engine.served()
    with pytest.raises(CheckpointError):
        await engine.replace(published(2, "other"), [tensors])
    assert engine.served() == before
    served = await engine.replace(published(3, digest), [tensors])
    assert (served.version, served.fingerprint, served.run_id) == (3, digest, "run")


async def test_patches_of_the_served_weights_are_served_and_others_change_nothing(engine: RolloutEngine) -> None:
    """Two patches that follow each other; the fingerprint of the result decides."""
    versions = [engine.parameters()]
    for row in (0, 1):
        versions.append(tree_map(lambda array, row=row: array.at[row].add(0.5), versions[-1]))
    mx.eval(versions)
    stored = [{name: as_stored(array) for name, array in named_arrays(one).items()} for one in versions]
    digests = [fingerprint(one) for one in versions]
    patches = [
        make_patch(stored[i], stored[i + 1], base_fingerprint=digests[i], fingerprint=digests[i + 1]) for i in (0, 1)
    ]
    contents = [patch for patch in patches if patch is not None]
    before = engine.served()
    for digest, damaged in ((digests[1], contents), (digests[2], contents[1:]), (digests[2], [contents[0][:-1]])):
        with pytest.raises(CheckpointError):
            await engine.replace(published(9, digest, patched=True), damaged)
    assert engine.served() == before
    served = await engine.replace(published(9, digests[2], patched=True), contents)
    assert (served.version, served.fingerprint, fingerprint(engine.parameters())) == (9, digests[2], digests[2])


def test_a_model_that_is_missing_is_reported(tmp_path: Path) -> None:
    """The worker does not start; the run logs the reason."""
    with pytest.raises(ClothoError):
        RolloutEngine(small_settings(tmp_path / "missing"))


def test_the_sections_that_a_worker_gets_have_the_settings_of_attachments() -> None:
    """A run sends what its profile has."""
    profile = load_profile("local-m3", {"engine.speculation": "prompt", "memory.cache_limit_mib": 3})
    sent = EngineWorkerSettings(
        model=profile.model,
        policy=profile.policy,
        sampling=profile.sampling,
        engine=profile.engine,
        memory=profile.memory,
        seed=0,
    )
    found = worker_settings(msgspec.msgpack.encode(sent))
    assert (found.engine, found.memory) == (profile.engine, profile.memory)
