"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures throughput and time to first token of the standalone server with 1 to 64 clients, beside mlx_lm.server.

    python -m bench http [--repeats 3] [--out bench/results/http.jsonl]

Each client sends chat completion requests one after the other, at temperature 1, with different questions; every
response has 64 tokens. First, each client receives four complete responses; the throughput is the tokens of all clients
per second until the last response. Then each client receives four streamed responses; the result is the median time to
the first text. Both servers listen on loopback, run in separate processes, load the same files and the same BLAS, and
alternate. All clients share one small process. Models: the embedded policy, and a random Qwen3 shape of 6 layers of
width 256 with the same tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.charts import draw_lines
from bench.contenders.process import Contender, Metric, measure_interleaved
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "http"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_serve"),
    Contender(name="mlx_lm.server", module="bench.contenders.mlx_lm_serve", foreign=True),
)
METRICS = (
    Metric(name="tokens_per_second", unit="tokens/s", better="higher"),
    Metric(name="first_token_seconds", unit="seconds", better="lower"),
)
MODELS, CLIENTS = ("embedded", "6m"), (1, 4, 16, 64)
TOKENS, ANSWERS = 64, 4
Case = dict[str, str | int | float]


def measure(
    models: Sequence[str], clients: Sequence[int], repeats: int, contenders: Sequence[Contender] = CONTENDERS
) -> list[Measurement]:
    """Measure every number of clients with every model."""
    cases: list[Case] = [
        {"model": model, "clients": count, "tokens": TOKENS, "answers": ANSWERS, "streamed": ANSWERS}
        for model in models
        for count in clients
    ]
    return measure_interleaved(NAME, contenders, cases, METRICS, repeats=repeats, command=COMMAND)


def table(results: Sequence[Measurement]) -> str:
    """Format the results as Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Draw tokens per second of the embedded policy against the number of clients."""
    mine = [one for one in results if one.case["model"] == MODELS[0]]
    draw_lines(mine, "tokens_per_second", "clients", target, title="HTTP API, embedded policy")


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="measure 4 clients of the embedded policy once",
    results=RESULTS,
    measure=lambda repeats, quick: measure(MODELS[:1], (4,), 1) if quick else measure(MODELS, CLIENTS, repeats),
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
