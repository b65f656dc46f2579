"""What happens as model and batch grow: ours alone, decoding and learning.

    python -m bench scaling [--repeats 3] [--out bench/results/scaling.jsonl]

Decoding draws 64 tokens per row, in groups of 8 at prompts of 128 tokens where nothing else is said, 32 rows at once;
learning is one policy update. Both run in a process of their own, on random Qwen3 shapes in float32 with tied
embeddings (6m: 6 layers of width 256, 25m: 8 layers of width 512) and on the policy that is shipped. The share of the
peak is that of `python -m bench decode`.
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
from bench.tables import closing, markdown, number, spread

NAME = "scaling"
COMMAND = "python -m bench scaling"
RESULTS = results_path(NAME)
Case = dict[str, str | int | float]

DECODING = Contender(name="clotho", module="bench.contenders.clotho_decode")
LEARNING = Contender(name="clotho", module="bench.contenders.clotho_learn")
RATE = Metric(name="tokens_per_second", unit="tokens/s", better="higher")
PER_TOKEN = Metric(name="microseconds_per_token", unit="µs", better="lower")
PEAK = Metric(name="peak_fraction", unit="peak_fraction", better="higher")
SECONDS = Metric(name="seconds", unit="s", better="lower")
GROUP = 8
VOCABULARIES = {"embedded": 384, "6m": 4096, "25m": 8192}


def decoding(model: str = "6m", *, vocabulary: int = 0, rows: int = 32, prompt_tokens: int = 128) -> Case:
    """A case of decoding; rows are groups of 8 where they are so many."""
    group = min(rows, GROUP)
    shape: Case = {"model": model, "vocabulary": vocabulary or VOCABULARIES[model]}
    return {**shape, "prompts": rows // group, "group": group, "prompt_tokens": prompt_tokens, "new_tokens": 64}


def learning(model: str = "6m", *, vocabulary: int = 0, completion_tokens: int = 128) -> Case:
    """A case of learning: one group."""
    shape: Case = {"model": model, "vocabulary": vocabulary or VOCABULARIES[model]}
    return {**shape, "prompts": 1, "group": GROUP, "prompt_tokens": 128, "completion_tokens": completion_tokens}


LARGEST = 151_936
"""Learning with it is `python -m bench head`'s question."""
SIZES: tuple[tuple[str, int], ...] = (("embedded", 0), ("6m", 0), ("6m", 32_768), ("6m", LARGEST), ("25m", 0))
ROWS = (1, 2, 4, 8, 16, 32, 64)
SWEEPS: tuple[tuple[str, tuple[str, ...], tuple[Case, ...]], ...] = (
    (
        "Decoding: model and vocabulary",
        ("model", "vocabulary"),
        tuple(decoding(model, vocabulary=vocabulary) for model, vocabulary in SIZES),
    ),
    ("Decoding 6m: rows", ("prompts", "group"), tuple(decoding(rows=rows) for rows in ROWS)),
    (
        "Decoding 6m: length of the prompts",
        ("prompt_tokens",),
        tuple(decoding(prompt_tokens=length) for length in (16, 128, 512, 1024)),
    ),
    (
        "One update: model and vocabulary",
        ("model", "vocabulary"),
        tuple(learning(model, vocabulary=vocabulary) for model, vocabulary in SIZES if vocabulary != LARGEST),
    ),
    (
        "One update of 6m: tokens of each of 8 completions",
        ("completion_tokens",),
        tuple(learning(completion_tokens=length) for length in (32, 64, 128, 256, 512)),
    ),
)
"""Title, what varies, and the cases; a case that is in several is measured once."""

QUICK: tuple[Case, ...] = (decoding("embedded"), learning("embedded"))


def measure(cases: Sequence[Case], repeats: int) -> list[Measurement]:
    """All cases, those of decoding first; one run of each is left out."""
    halves = (DECODING, [RATE, PER_TOKEN, PEAK], "new_tokens"), (LEARNING, [SECONDS, PER_TOKEN], "completion_tokens")
    found = []
    for contender, metrics, key in halves:
        mine = [case for case in cases if key in case]
        found += by_turns(NAME, [contender], mine, metrics, repeats=repeats, command=COMMAND)
    return found


def all_cases() -> list[Case]:
    """Each once."""
    cases: list[Case] = []
    for _, _, swept in SWEEPS:
        cases += [case for case in swept if case not in cases]
    return cases


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """All results; none where there is no file."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """A table per thing that varies; a row per case, a column per metric."""
    parts = []
    for title, keys, cases in SWEEPS:
        measured = [[one for one in results if one.case == case] for case in cases]
        if rows := [_row(keys, metrics) for metrics in measured if metrics]:
            names = [one.metric for one in next(filter(None, measured))]
            heading = [name.replace("_", " ") for name in (*keys, *names)]
            parts.append(f"**{title}**\n\n{markdown(heading, rows, text_columns=len(keys))}")
    return "\n\n".join([*parts, closing(results)])


def _row(keys: Sequence[str], metrics: Sequence[Measurement]) -> list[str]:
    """What varies, and all metrics of one case."""
    varied = [metrics[0].case[key] for key in keys]
    named = [value if isinstance(value, str) else number(value) for value in varied]
    return [*named, *(spread(one.values, one.unit) for one in metrics)]


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Tokens per second against the rows of whole groups that decode at once."""
    wanted = [decoding(rows=rows) for rows in ROWS if rows >= GROUP]
    chosen = [one for one in results if one.case in wanted]
    draw_lines(chosen, RATE.name, "prompts", target, title="decoding 6m, prompts of 8 completions", logarithmic=True)


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="the smallest model alone, once",
    results=RESULTS,
    measure=lambda repeats, quick: measure(QUICK, 1) if quick else measure(all_cases(), repeats),
    table=table,
)
main = partial(answer, QUESTION)
