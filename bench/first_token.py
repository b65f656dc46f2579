"""How long until the first token of a rollout, against the length of its prompt, beside mlx-lm.

    python -m bench first_token [--repeats 7] [--out bench/results/first_token.jsonl]

One prompt of random tokens and one completion, by an engine that has nothing else to do; two random Qwen3 shapes in
float32, the same weights and prompts for both contenders, which are processes of their own and run by turns. Nothing is
remembered of a prompt from one run to the next.
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

NAME = "first_token"
COMMAND = "python -m bench first_token"
RESULTS = results_path(NAME)
Case = dict[str, str | int | float]

CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_first_token"),
    Contender(name="mlx-lm", module="bench.contenders.mlx_lm_first_token", foreign=True),
)
SECONDS = Metric(name="seconds", unit="s", better="lower")
MODELS, LENGTHS = ("6m", "25m"), (16, 128, 512, 1024)


def measure(models: Sequence[str], lengths: Sequence[int], repeats: int) -> list[Measurement]:
    """Every model with every length of the prompt; the first two runs of a case are left out."""
    cases: list[Case] = [{"model": model, "prompt_tokens": length} for model in models for length in lengths]
    return by_turns(NAME, CONTENDERS, cases, [SECONDS], repeats=repeats, command=COMMAND, warm_up=2)


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """All results; none where there is no file."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """A row per model and length."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Seconds against the length of the prompt, for the largest model."""
    model = results[-1].case["model"]
    chosen = [one for one in results if one.case["model"] == model]
    title = f"first token of {model}, one prompt"
    draw_lines(chosen, SECONDS.name, "prompt_tokens", target, title=title, logarithmic=True)


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=7,
    quick="the smallest model and two lengths, once",
    results=RESULTS,
    measure=lambda repeats, quick: measure(MODELS[:1], LENGTHS[:2], 1) if quick else measure(MODELS, LENGTHS, repeats),
    table=table,
)
main = partial(answer, QUESTION)
