"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the standalone server with 1 to 64 clients, without and with an adapter, beside mlx_lm.server.

    python -m bench serve [--only adapter] [--repeats 3] [--out bench/results/serve.jsonl]

Each client sends chat completion requests one after the other, at temperature 1, with different questions; every
response has 64 tokens. First, each client receives four complete responses; the throughput is the tokens of all clients
per second until the last response. Then each client receives four streamed responses; the result is the median time to
the first text. With an adapter (rank 8 on every linear layer of the blocks), which all requests name, there are three
complete responses per client and no streamed ones.

`python pipeline.py serve --model M [--adapter bench=PATH]` and `mlx_lm.server --model M [--adapter-path PATH]` load the
same files and the same BLAS, listen on loopback in separate processes, and alternate. All clients share one small
process. Models: the embedded policy, and a random Qwen3 shape of 6 layers of width 256 with the same tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.benchmark import Benchmark
from bench.charts import draw_lines
from bench.contenders.process import Contender, measure_interleaved
from bench.measurement import Case, Measurement, Metric
from bench.tables import closing, side_by_side

NAME = "serve"
CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_serve"),
    Contender(name="mlx_lm.server", module="bench.contenders.mlx_lm_serve", foreign=True),
)
RATE = Metric(name="tokens_per_second", unit="tokens/s", better="higher")
FIRST_TOKEN = Metric(name="first_token_seconds", unit="seconds", better="lower")
MODELS, CLIENTS, RANK = ("embedded", "6m"), (1, 4, 16, 64), 8


def case(model: str, clients: int, rank: int) -> Case:
    """One case. rank: of the adapter; 0: no adapter."""
    answers, streamed = (3, 0) if rank else (4, 4)
    load: Case = {"clients": clients, "tokens": 64, "answers": answers, "streamed": streamed}
    return {"model": model, "adapter_rank": rank, **load}


def measure(cases: Sequence[Case], repeats: int, contenders: Sequence[Contender] = CONTENDERS) -> list[Measurement]:
    """Measure some cases."""
    return measure_interleaved(NAME, contenders, cases, [RATE, FIRST_TOKEN], repeats=repeats)


def measure_plain(repeats: int, quick: bool) -> list[Measurement]:
    """Measure without an adapter; quick: 4 clients of the embedded policy once."""
    if quick:
        return measure([case(MODELS[0], 4, 0)], 1)
    return measure([case(model, clients, 0) for model in MODELS for clients in CLIENTS], repeats)


def measure_adapter(repeats: int, quick: bool) -> list[Measurement]:
    """Measure with an adapter; quick: 16 clients of the embedded policy once."""
    if quick:
        return measure([case(MODELS[0], 16, RANK)], 1)
    return measure([case(model, clients, RANK) for model in MODELS for clients in CLIENTS[2:]], repeats)


def table(results: Sequence[Measurement]) -> str:
    """Rates and times without an adapter, and rates with one, as far as they were measured."""
    parts = []
    for rank, metrics in ((0, (RATE, FIRST_TOKEN)), (RANK, (RATE,))):
        found = [one for one in results if one.case["adapter_rank"] == rank]
        parts += [side_by_side(found, metric.name) for metric in metrics if found]
    return "\n\n".join([*parts, closing(results)])


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Draw tokens per second of the embedded policy without an adapter against the number of clients."""
    mine = [one for one in results if one.case["model"] == MODELS[0] and not one.case["adapter_rank"]]
    draw_lines(mine, RATE.name, "clients", target, title="HTTP API, embedded policy")


PARTS = {"plain": measure_plain, "adapter": measure_adapter}
BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=3,
    quick="measure the embedded policy once, with 4 clients, and with 16 and an adapter",
    measure=lambda repeats, quick: [one for part in PARTS.values() for one in part(repeats, quick)],
    table=table,
    parts=PARTS,
)
read, main = BENCHMARK.read, BENCHMARK.main
