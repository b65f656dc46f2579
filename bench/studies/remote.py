"""Latency of giving an inference server new weights, on loopback. Measured on Linux and the CPU only, not on Metal.

    python -m bench remote [--repeats 100] [--out bench/results/remote.jsonl]

The weights are the adapter of local-m3. `push` and `path` are the time of one request to `pipeline.py serve`, which
verifies the weights and swaps them in between two decode steps; the server is idle, or decodes 64 completions.
`restart` is the time until a restarted `mlx_lm.server` has sampled one token with the new adapter; a twentieth of the
repeats. `return` is the time from the first answer of a server that was killed and started again until a run uses it,
with its current weights; the same number of repeats.
"""

from __future__ import annotations

import asyncio
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import mlx.core as mx
from mlx.utils import tree_map
from msgspec import Struct

from attachments.remote.messages import ServedPolicy
from attachments.remote.mlx_server import MlxServer
from attachments.remote.sampler import RemoteSampler
from attachments.remote.server import RemoteFailure, RemoteServer
from attachments.remote.weights import Delivery, OverHttp, SharedDirectory, Weights
from bench.benchmark import Benchmark
from bench.contenders.http_server_load import free_port
from bench.fingerprint import ROOT
from bench.fingerprint import fingerprint as machine
from bench.measurement import Measurement, Metric, measured
from bench.tables import closing as conditions
from bench.tables import markdown
from clotho.lanes.compute_thread import Compute, finish
from clotho.models.machine import compute_slots
from clotho.models.parameters import fingerprint, layout
from clotho.models.policy import Policy, load_policy
from clotho.scoring.prompt_logprobs import PromptScorer
from clotho.settings.model import Lora, ModelSection, PolicySection
from protocols.checkpoint import AdapterConfig
from protocols.sampling import PromptLogprobs, SampleRequest, Sampling, completion_seeds
from protocols.step import PolicyUpdated, WeightsReady
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue

NAME = "remote"
OURS, METRIC = "clotho", Metric(name="latency_seconds", unit="seconds", better="lower")
MODEL = ROOT / "profiles" / "embedded"
METHOD = Lora(rank=16, scale=2.0)
PROMPT = tuple(range(40, 72))
ROWS, GROUP, WARM_UP = 64, 8, 3
START_SECONDS = 120.0
SEMANTICS = "Seconds from the call until the server samples with the weights, their verification included."


class Trainer(Struct, frozen=True, kw_only=True):
    """The side of the training run. versions: two sets of weights with their fingerprints, which alternate."""

    compute: Compute
    policy: Policy
    scorer: PromptScorer
    versions: tuple[tuple[Any, str], ...]

    def weights(self, version: int) -> Weights:
        """Return the weights of a version."""
        parameters, digest = self.versions[version % 2]
        return Weights(ready=WeightsReady(version=version, step=version, fingerprint=digest), parameters=parameters)

    async def score(self, tokens: tuple[int, ...], _: float) -> PromptLogprobs:
        """Log-probabilities of tokens under the policy."""
        parameters, version = self.policy.served()
        return await finish(self.compute.scoring.submit(lambda: self.scorer.score(parameters, tokens, version=version)))


@contextmanager
def trainer() -> Iterator[Trainer]:
    """Load the policy of local-m3 in a compute thread."""
    compute = Compute(decode_share=0.5, slots=compute_slots())
    compute.start()

    def load() -> Trainer:
        policy = load_policy(ModelSection(path=str(MODEL)), PolicySection(method=METHOD), seed=0, keep_reference=False)
        versions = [policy.trainable(), tree_map(lambda array: array + 0.001, policy.trainable())]
        mx.eval(versions)
        scorer = PromptScorer(policy.copy_model(), chunk=256)
        known = tuple((tree, fingerprint(tree)) for tree in versions)
        return Trainer(compute=compute, policy=policy, scorer=scorer, versions=known)

    try:
        yield compute.learner.submit(load).result()
    finally:
        compute.stop()


def start(port: int, shared: Path) -> subprocess.Popen[bytes]:
    """Start `pipeline.py serve` for local-m3."""
    settings = ["--profile", "local-m3", "--server.port", str(port), "--server.accept-weights", "true"]
    command = [sys.executable, "pipeline.py", "serve", *settings, "--server.weights-root", str(shared)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr)


async def until_it_answers(client: RemoteServer) -> None:
    """Wait until a server reports its state."""
    with anyio.fail_after(START_SECONDS):
        while True:
            try:
                await client.served()
            except RemoteFailure:
                await anyio.sleep(0.02)
            else:
                return


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    with anyio.fail_after(START_SECONDS):
        while not condition():  # noqa: ASYNC110 - the sampler of a run tells nobody
            await anyio.sleep(0.005)


@asynccontextmanager
async def decoding(client: RemoteServer, rows: int) -> AsyncIterator[None]:
    """Keep completions in flight on a server while the block runs."""

    async def groups(number: int) -> None:
        while True:
            seeds = completion_seeds(number, GROUP)
            await client.sample(SampleRequest(prompt=PROMPT, sampling=Sampling(max_tokens=400), seeds=seeds))

    async with anyio.create_task_group() as tasks:
        for number in range(rows // GROUP):
            tasks.start_soon(groups, number)
        yield
        tasks.cancel_scope.cancel()


async def pushes(one: Trainer, client: RemoteServer, repeats: int, rows: int) -> list[float]:
    """Seconds of each push."""
    seconds = []
    async with decoding(client, rows):
        for version in range(1, WARM_UP + repeats + 1):
            weights, began = one.weights(version), time.perf_counter()
            await client.push(weights)
            seconds.append(time.perf_counter() - began)
            await anyio.sleep(0.02)
    return seconds[WARM_UP:]


async def restarts(one: Trainer, directory: Path, repeats: int) -> list[float]:
    """Seconds from the end of one `mlx_lm.server` to the first token of the next one."""

    async def loadable(parameters: Any) -> tuple[object, AdapterConfig]:
        return await finish(one.compute.learner.submit(lambda: one.policy.loadable(parameters)))

    none = ServedPolicy(version=-1, step=-1, fingerprint="", run_id="", layout="", vocab_size=0, context_length=0)
    server = MlxServer(
        f"http://127.0.0.1:{free_port()}",
        model=MODEL,
        tokenizer=one.policy.tokenizer,
        loadable=loadable,
        unstarted=none,
        directory=directory,
        concurrency=ROWS,
        start_seconds=START_SECONDS,
        timeout_seconds=START_SECONDS,
    )
    request = SampleRequest(prompt=PROMPT, sampling=Sampling(max_tokens=1), seeds=(0,))
    seconds = []
    try:
        for version in range(1, repeats + 2):
            began = time.perf_counter()
            await server.push(one.weights(version))
            await server.sample(request)
            seconds.append(time.perf_counter() - began)
    finally:
        await server.close()
    return seconds[1:]


async def returns(one: Trainer, shared: Path, repeats: int) -> list[float]:
    """Seconds from the first answer of a restarted server until the sampler of a run uses it."""
    port, start_weights = free_port(), one.weights(0)
    updates, weights = Queue[PolicyUpdated]("updates", capacity=1), Latest[WeightsReady]("weights")
    weights.put(start_weights.ready)
    url, (parameters, _) = f"http://127.0.0.1:{port}", one.versions[0]
    sampler = RemoteSampler(
        [RemoteServer(url, run_id="bench")],
        updates=updates.inbox(),
        weights=weights,
        start=start_weights,
        layout=layout(parameters),
        vocab_size=one.policy.vocab_size,
        decode=one.policy.tokenizer.decode,
        run_id="bench",
        sync_interval=1,
        probe_prompt=PROMPT,
        recompute=one.score,
        sampling=Sampling(max_tokens=8),
        patience_seconds=math.inf,
    )

    def is_ready() -> bool:
        return sampler.gauges().servers[0].state == "ready"

    seconds = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler.run)
        for _ in range(repeats):
            process = start(port, shared)
            try:
                await until_it_answers(RemoteServer(url))
                began = time.perf_counter()
                await until(is_ready)
                seconds.append(time.perf_counter() - began)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            await until(lambda: not is_ready())
            await anyio.sleep(2.0)
        tasks.cancel_scope.cancel()
    return seconds


async def latencies(repeats: int) -> list[tuple[str, int, list[float]]]:
    """Each way with the number of completions in flight, and its seconds."""
    found = []
    with trainer() as one, tempfile.TemporaryDirectory() as directory:
        shared, port = Path(directory, "shared"), free_port()
        ways: dict[str, Delivery] = {"push": OverHttp(), "path": SharedDirectory(shared, "bench")}
        process = start(port, shared)
        try:
            await until_it_answers(RemoteServer(f"http://127.0.0.1:{port}"))
            for rows in (0, ROWS):
                for way, delivery in ways.items():
                    client = RemoteServer(f"http://127.0.0.1:{port}", run_id="bench", delivery=delivery)
                    found.append((way, rows, await pushes(one, client, repeats, rows)))
                    await client.close()
        finally:
            process.terminate()
            process.wait()
        rare = max(1, repeats // 20)
        found.append(("restart", 0, await restarts(one, Path(directory), rare)))
        found.append(("return", 0, await returns(one, shared, rare)))
    return found


def measure(repeats: int) -> list[Measurement]:
    """Measure every way."""
    here = machine()
    return [
        measured(NAME, {"way": way, "rows": rows}, OURS, METRIC, values, here, semantics=SEMANTICS)
        for way, rows, values in asyncio.run(latencies(repeats))
    ]


def table(results: Sequence[Measurement]) -> str:
    """Median and 95th percentile of each way."""
    rows = []
    for one in results:
        ordered = sorted(one.values)
        late = ordered[math.ceil(0.95 * len(ordered)) - 1]
        shown = [_time(statistics.median(ordered)), _time(late), str(len(ordered))]
        rows.append([str(one.case["way"]), str(one.case["rows"]), *shown])
    heading = ["way", "completions in flight", "median", "95th percentile", "repeats"]
    return f"{markdown(heading, rows, text_columns=1)}\n\n{conditions(results)}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.5 else f"{seconds:.2f} s"


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=100,
    quick="five pushes",
    measure=lambda repeats, quick: measure(5 if quick else repeats),
    table=table,
)
read, main = BENCHMARK.read, BENCHMARK.main
