"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the start of training beside mlx-lm-lora and TRL: the first updates on the task of profile local-m3.

    python -m bench startup_training [--repeats 5] [--quick] [--out bench/results/startup_training.jsonl]

The shipped policy has the skill already and learns in the first update to prefer its careful mode. So these numbers
compare the costs of starting and of single updates. `python -m bench time_to_accuracy` measures learning.

All contenders train the policy of profile local-m3 with GRPO: the same adapter, problems, rewards and token limit.
`seconds` is training time: loading is not counted, and evaluation happens with the clock stopped or after the run.
`from_command` also counts the time before the first prompt: imports, loading and, for Clotho, the warmup step and the
first parity check. One repeat is one seed, the same for all contenders. Every run is a separate process.

until 0.9: seconds until the greedy accuracy on all 512 held-out problems, measured after every update, reaches 0.9.
mlx-lm-lora and Clotho use the best settings that `bench.search` found for each; TRL uses those of mlx-lm-lora with 16
completions. MLX's Adam does not correct its bias by default, so TRL's learning rate is three times as high, which gives
the same first step. A run of the peers is stopped after five processor seconds; its accuracy shows that. Clotho runs
synchronously and without collapse detection, which the others do not have; `clotho, asynchronous` is the same with
asynchronous rollouts. With these settings one update of 12 or 16 completions is enough. `clotho, as shipped` is the
unchanged profile, which warms up over five updates; it ends after twelve updates. All others are also measured with two
threads for matrix products.

equal work: seconds for 20 updates of 16 groups of 8 completions at learning rate 1e-3, whatever the accuracy. The
number of completions is equal; the number of tokens depends on the policy and is only similar.

long tail: completion lengths are lognormal, with the median and mean of the policy's own lengths, and a reward sleeps
50 ms per completion; 20 updates of 16 groups of 8 completions, asynchronous and synchronous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from bench import tables
from bench.benchmark import Benchmark, run_benchmark
from bench.contenders.clotho_train import FLAGS, NO_COLLAPSE_DETECTION
from bench.contenders.process import Contender, Metric, measure_interleaved
from bench.measurement import Measurement, ratios, results_path
from bench.measurement import read as read_measurements

NAME = "startup_training"
COMMAND = "python -m bench startup_training"
PROGRAM = "bench.contenders.clotho_train"
TUNED = (
    "--learner.batch-size 4 --sampling.group-size 4 --learner.optimizer.learning-rate 0.006 "
    f"--learner.schedule.warmup-steps 0 --learner.schedule constant {NO_COLLAPSE_DETECTION} --steps 8"
)
SYNCHRONOUS = "--async false"
METRICS = (
    Metric(name="seconds", unit="s", better="lower"),
    Metric(name="from_command", unit="s", better="lower"),
    Metric(name="updates", unit="updates", better="lower"),
    Metric(name="accuracy", unit="share", better="higher"),
)
CLOCKS = METRICS[:2]
UNTIL: dict[str, str | int | float] = {"task": "until 0.9", "profile": "arithmetic", "target": 0.9, "limit": 5.0}
EQUAL: dict[str, str | int | float] = {
    "task": "equal work",
    "profile": "arithmetic",
    "updates": 20,
    "batch_size": 16,
    "group_size": 8,
    "learning_rate": 1e-3,
    "loss": "bnpo",
    "stop": "",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
}
LONG: dict[str, str | int | float] = {"task": "long tail", "profile": "long-tail", "updates": 20}

MLX_LM_LORA = Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_train", foreign=True)
MLX_LM_LORA_2 = replace(MLX_LM_LORA, name="mlx-lm-lora, 2 threads", environment={"MKL_NUM_THREADS": "2"})
OFFLINE = {"HF_HUB_OFFLINE": "1"}
TRL = Contender(name="trl", module="bench.contenders.trl_train", foreign=True, environment=OFFLINE)
TRL_2 = replace(TRL, name="trl, 2 threads", environment=OFFLINE | {"TRL_BENCH_THREADS": "2"})


def ours(name: str, flags: str, **environment: str) -> Contender:
    """A Clotho contender with additional flags and environment variables."""
    return Contender(name=name, module=PROGRAM, environment={FLAGS: flags, **environment})


UNTIL_CONTENDERS = (
    ours("clotho", f"{TUNED} {SYNCHRONOUS}"),
    ours("clotho, 2 threads", f"{TUNED} {SYNCHRONOUS}", MKL_NUM_THREADS="2"),
    ours("clotho, asynchronous", TUNED),
    ours("clotho, as shipped", "--steps 12"),
    MLX_LM_LORA,
    MLX_LM_LORA_2,
    TRL,
    TRL_2,
)
BOTH_WAYS = (ours("clotho", ""), ours("clotho, synchronous", SYNCHRONOUS))


def measure(*, repeats: int, quick: bool) -> list[Measurement]:
    """Measure all three tasks; quick: two updates of the last two tasks, Clotho only."""
    if quick:
        few = {"updates": 2}
        return [*_run(BOTH_WAYS, EQUAL | few, repeats), *_run(BOTH_WAYS, LONG | few, repeats)]
    return [
        *_run(UNTIL_CONTENDERS, UNTIL, repeats),
        *_run((*BOTH_WAYS, MLX_LM_LORA, TRL), EQUAL, repeats),
        *_run(BOTH_WAYS, LONG, repeats),
    ]


def _run(contenders: Sequence[Contender], case: Mapping[str, str | int | float], repeats: int) -> list[Measurement]:
    """Run the contenders alternately, every run in its own process, so that the cost of a first update is included."""
    found: dict[tuple[str, str], Measurement] = {}
    for seed in range(repeats):
        seeded = {**case, "seed": seed}
        for one in measure_interleaved(NAME, contenders, [seeded], METRICS, repeats=1, command=COMMAND, warm_up=0):
            key = one.contender, one.metric
            earlier = found[key].values if key in found else []
            found[key] = replace(one, case=dict(case), values=[*earlier, *one.values])
    return list(found.values())


def read(path: Path | None = None) -> Sequence[Measurement]:
    """Read the results; an empty list if the file does not exist."""
    return read_measurements(path or results_path(NAME))


def table(results: Sequence[Measurement]) -> str:
    """One table per task, one row per contender, and what the seconds of each contender mean."""
    parts = [_of_task(results, task) for task in tables.unique(str(one.case["task"]) for one in results)]
    return "\n\n".join([*parts, tables.closing(results)])


def _of_task(results: Sequence[Measurement], task: str) -> str:
    """Medians and ranges of one task, and Clotho's ratio seed by seed."""
    mine = {(one.contender, one.metric): one for one in results if one.case["task"] == task}
    shown = [metric for metric in METRICS if any(name == metric.name for _, name in mine)]
    clocks = [metric for metric in shown if metric in CLOCKS]
    rows = []
    for contender in tables.unique(contender for contender, _ in mine):
        found = [mine.get((contender, metric.name)) for metric in shown]
        cells = ["" if one is None else tables.spread(one.values, one.unit) for one in found]
        rows.append([contender, *cells, *(_ratio(mine, contender, clock.name) for clock in clocks)])
    compared = (f"{clock.name}, clotho / this" for clock in clocks)
    return tables.markdown([task, *(metric.name for metric in shown), *compared], rows)


def _ratio(mine: Mapping[tuple[str, str], Measurement], contender: str, clock: str) -> str:
    ours, theirs = mine.get((tables.OURS, clock)), mine.get((contender, clock))
    if ours is None or theirs is None or contender == tables.OURS:
        return ""
    return tables.spread(ratios(ours, theirs), "")


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Bars of seconds, grouped by task."""
    from bench.charts import draw_bars

    draw_bars(results, "seconds", target, key="task", title="seconds of training")


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=5,
    quick="measure two updates of the last two tasks, Clotho only",
    results=results_path(NAME),
    measure=lambda repeats, quick: measure(repeats=1 if quick else repeats, quick=quick),
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
