"""How many tokens per second over HTTP, and how soon the first, under 1 to 64 clients.

    python -m bench http [--repeats 3] [--out bench/results/http.jsonl]

Each client sends chat completions one after the other, at temperature 1, no two questions alike; all answers have 64
tokens. Four answers each, whole ones first, which give the tokens per second of all clients together until the last
answer is there; then the same with streams, which give the median time to the first text. Both
servers run on the loopback, in a process of their own, load the same files and the same BLAS, and take turns; the
clients are one small process. Models: the policy that ships with the project, and a random Qwen3 shape of 6 layers of
width 256 with the same tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.answering import Question, answer
from bench.charts import draw_lines
from bench.contenders.process import Contender, Metric, by_turns
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "http"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_http"),
    Contender(name="mlx_lm.server", module="bench.contenders.mlx_lm_http", foreign=True),
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
    """Every number of clients with every model."""
    cases: list[Case] = [
        {"model": model, "clients": count, "tokens": TOKENS, "answers": ANSWERS}
        for model in models
        for count in clients
    ]
    return by_turns(NAME, contenders, cases, METRICS, repeats=repeats, command=COMMAND)


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """All results; none where there is no file."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """The results in Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Tokens per second of the shipped policy against the number of clients."""
    mine = [one for one in results if one.case["model"] == MODELS[0]]
    draw_lines(mine, "tokens_per_second", "clients", target, title="over HTTP, the shipped policy")


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="4 clients of the shipped policy, once",
    results=RESULTS,
    measure=lambda repeats, quick: measure(MODELS[:1], (4,), 1) if quick else measure(MODELS, CLIENTS, repeats),
    table=table,
)
main = partial(answer, QUESTION)
