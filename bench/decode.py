"""How fast are rollouts: completions of random tokens, without an end, beside mlx-lm and mlx-lm-lora.

    python -m bench decode [--repeats 5] [--out bench/results/decode.jsonl]

The first case is what an update of GRPO asks for: 4 prompts of 128 tokens, 8 completions of 64 tokens each, at
temperature 1, all 32 rows at once. From it one thing at a time is varied: the number of prompts, how 32 rows are
divided into groups, and the length of the prompts. Models are random Qwen3 shapes in float32 with tied embeddings, the
same weights and prompts for all: 6m has 6 layers of width 256 and a vocabulary of 4,096, 25m has 8 layers of width 512
and 8,192. Contenders are processes of their own that run by turns and load the same BLAS.

mlx-lm-lora generates through mlx-lm's `BatchGenerator`, on which it forks one computed prompt per group, so it stands
for what mlx-lm can do where its caller knows of groups. How its trainer calls it is measured once, in the first case.
The share of the peak is the operations that a contender's matrix products need (two per weight for each token that it
computes; attention, and what is computed in vain, do not count) per second, over those of one large product in the same
process. All have one thread for BLAS on two cores, as our run does by default; the first case is repeated with two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from bench import measurement
from bench.answering import Question, answer
from bench.charts import draw_lines
from bench.contenders import decoding
from bench.contenders.process import Contender, Metric, by_turns
from bench.measurement import Measurement, results_path
from bench.tables import closing, side_by_side

NAME = "decode"
COMMAND = "python -m bench decode"
RESULTS = results_path(NAME)
Case = dict[str, str | int | float]

OURS = Contender(name="clotho", module="bench.contenders.clotho_decode")
MLX_LM = Contender(name="mlx-lm", module="bench.contenders.mlx_lm_decode", foreign=True)
MLX_LM_LORA = Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_decode", foreign=True)
AS_CALLED = Contender(
    name="mlx-lm-lora, as its trainer calls it",
    module="bench.contenders.mlx_lm_lora_decode",
    foreign=True,
    environment={decoding.AS_CALLED: "1"},
)
RATE = Metric(name="tokens_per_second", unit="tokens/s", better="higher")
PEAK = Metric(name="peak_fraction", unit="peak_fraction", better="higher")
COUNTED = "The share of the peak counts all that a contender computes, a prompt as often as it computes it."
THREADS = 2
ROWS = 32


def case(model: str, *, prompts: int = 4, group: int = 8, prompt_tokens: int = 128) -> Case:
    """By default the first case."""
    return {"model": model, "prompts": prompts, "group": group, "prompt_tokens": prompt_tokens, "new_tokens": 64}


SWEEPS: tuple[Case, ...] = (
    *(case("6m", prompts=prompts) for prompts in (1, 2, 8, 16)),
    *(case("6m", prompts=ROWS // group, group=group) for group in (1, 4, 32)),
    *(case("6m", prompt_tokens=tokens) for tokens in (16, 512)),
)


def measure(repeats: int) -> list[Measurement]:
    """All cases; only the very first is repeated as often as asked, the larger model three times, the rest twice."""
    three, two = min(3, repeats), min(2, repeats)
    peers = [OURS, MLX_LM, MLX_LM_LORA]
    return [
        *_by_turns([*peers, AS_CALLED], [case("6m")], repeats),
        *_by_turns(peers, [case("25m")], three),
        *with_threads([case("6m"), case("25m")], three),
        *_by_turns(peers, SWEEPS, two),
    ]


def measure_quickly() -> list[Measurement]:
    """The first case with the policy that is shipped, once."""
    return _by_turns([OURS, MLX_LM, MLX_LM_LORA], [case("embedded")], 1)


def with_threads(cases: Sequence[Case], repeats: int) -> list[Measurement]:
    """All with a BLAS of two threads, which the case of the result says."""
    environment = {"MKL_NUM_THREADS": str(THREADS)}
    found = _by_turns([replace(one, environment=environment) for one in (OURS, MLX_LM, MLX_LM_LORA)], cases, repeats)
    return [replace(one, case={**one.case, "blas_threads": THREADS}) for one in found]


def _by_turns(contenders: Sequence[Contender], cases: Sequence[Case], repeats: int) -> list[Measurement]:
    return by_turns(NAME, contenders, cases, [RATE, PEAK], repeats=repeats, command=COMMAND)


def is_first(case: Case) -> bool:
    """Whether only the model, or the threads of BLAS, differ from the first case."""
    return (case["prompts"], case["group"], case["prompt_tokens"]) == (4, 8, 128)


VARIED: tuple[Callable[[Case], bool], ...] = (
    lambda case: (case["group"], case["prompt_tokens"]) == (8, 128),
    lambda case: (int(case["prompts"]) * int(case["group"]), case["prompt_tokens"]) == (ROWS, 128),
    lambda case: (case["prompts"], case["group"]) == (4, 8),
)
"""What belongs to each of the things varied: batch, group, length of the prompts."""


def sweep(results: Sequence[Measurement], belongs: Callable[[Case], bool]) -> list[Measurement]:
    """Cases of the small model in which one thing is varied, in its order, for contenders that did all of them."""
    found = [one for one in results if one.case["model"] == "6m" and belongs(one.case) and _plain(one)]
    return sorted(found, key=lambda one: [int(one.case[key]) for key in ("group", "prompts", "prompt_tokens")])


def _plain(one: Measurement) -> bool:
    return "blas_threads" not in one.case and one.contender != AS_CALLED.name


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """All results; none where there is no file."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """The first case before all, its share of the peak, and what is varied."""
    first = [one for one in results if is_first(one.case)]
    alone = [one for one in first if "blas_threads" not in one.case]
    threaded = [one for one in first if "blas_threads" in one.case]
    parts = [side_by_side(alone, RATE.name), side_by_side(alone, PEAK.name)]
    if threaded:
        parts += [side_by_side(threaded, RATE.name), side_by_side(threaded, PEAK.name)]
    sweeps = [sweep(results, belongs) for belongs in VARIED]
    parts += [side_by_side(found, RATE.name) for found in sweeps if len({str(one.case) for one in found}) > 1]
    return "\n\n".join([*parts, COUNTED, closing(results)])


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Tokens per second against the number of prompts. Raises ValueError where that was not varied."""
    batches = sweep(results, VARIED[0])
    title = "rollouts of 6m, 8 completions of 64 tokens per prompt of 128"
    draw_lines(batches, RATE.name, "prompts", target, title=title, logarithmic=True)


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=5,
    quick="the smallest case, once",
    results=RESULTS,
    measure=lambda repeats, quick: measure_quickly() if quick else measure(repeats),
    table=table,
)
main = partial(answer, QUESTION)
