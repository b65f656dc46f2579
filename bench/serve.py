"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the throughput of the standalone server with and without an adapter, for 16 and 64 clients, beside
mlx_lm.server with the same files.

    python -m bench serve [--repeats 3] [--out bench/results/serve.jsonl]

`python pipeline.py serve --model M [--adapter bench=PATH]` and `mlx_lm.server --model M [--adapter-path PATH]` load the
same files, are separate processes on loopback, and alternate. The adapter has rank 8 on every linear layer of the
blocks; `adapter rank` 0 means no adapter. The load is that of `python -m bench http`, with three complete responses of
64 tokens per client and no streamed ones. Models: the embedded policy, and a random Qwen3 shape of 6 layers of width
256 with the same tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.charts import draw_lines
from bench.contenders.process import Contender, measure_interleaved
from bench.http import METRICS, MODELS, TOKENS, Case
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "serve"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
OURS, THEIRS = "clotho", "mlx_lm.server"
CONTENDERS = (
    Contender(name=OURS, module="bench.contenders.clotho_serve"),
    Contender(name=THEIRS, module="bench.contenders.mlx_lm_serve", foreign=True),
)
RATE = METRICS[0]
CLIENTS, RANKS, ANSWERS = (16, 64), (0, 8), 3


def measure(
    models: Sequence[str],
    clients: Sequence[int],
    repeats: int,
    contenders: Sequence[Contender] = CONTENDERS,
    ranks: Sequence[int] = RANKS,
) -> list[Measurement]:
    """Measure every number of clients with every model and adapter."""
    cases: list[Case] = [
        {
            "model": model,
            "adapter_rank": rank,
            "clients": count,
            "tokens": TOKENS,
            "answers": ANSWERS,
            "streamed": 0,
        }
        for model in models
        for rank in ranks
        for count in clients
    ]
    return measure_interleaved(NAME, contenders, cases, [RATE], repeats=repeats, command=COMMAND)


def table(results: Sequence[Measurement]) -> str:
    """The rates."""
    return report(results, [RATE.name])


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Draw tokens per second of the embedded policy with an adapter against the number of clients."""
    mine = [one for one in results if one.case["model"] == MODELS[0] and one.case["adapter_rank"]]
    draw_lines(mine, RATE.name, "clients", target, title="Server with an adapter, embedded policy")


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="measure 16 clients of the embedded policy once",
    results=RESULTS,
    measure=lambda repeats, quick: measure(MODELS[:1], (16,), 1) if quick else measure(MODELS, CLIENTS, repeats),
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
