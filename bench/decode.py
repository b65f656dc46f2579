"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures rollout throughput beside mlx-lm and mlx-lm-lora, with completions of random tokens that never end early.

    python -m bench decode [--repeats 5] [--only {adapter,uneven}] [--quick] [--out bench/results/decode.jsonl]

The first case is a typical GRPO batch: 4 prompts of 128 tokens, 8 completions of 64 tokens each, temperature 1, all 32
sequences at once. The other cases vary one setting: the number of prompts, the group size for 32 sequences, and the
prompt length. Models are random Qwen3 shapes in float32 with tied embeddings, with the same weights and prompts for all
contenders: 6m has 6 layers of width 256 and a vocabulary of 4,096; 25m has 8 layers of width 512 and a vocabulary of
8,192. Each contender is a separate process; contenders alternate and load the same BLAS.

mlx-lm-lora generates with mlx-lm's `BatchGenerator` and prefills each group's prompt once, so it shows what mlx-lm can
do when the caller knows the groups. The batch size that its trainer uses is measured in the first case. The fraction of
peak is the matrix operations per second that a contender needs (two per weight and computed token; attention and
discarded work do not count), divided by those of one large matrix product in the same process. Contenders use one BLAS
thread on two cores, the default of a Clotho run; the first case is repeated with two threads.

In the case with lognormal lengths (median 64 tokens, at most 1,024), 32 of 128 completions are decoded together, and a
new one begins when one ends, as in asynchronous training. Short and long rows then share the batch.

The cases with an adapter compare what a Mac runs: MLX's kernels compute everything (CLOTHO_CPU_KERNELS=0), and every
linear layer of the blocks has LoRA matrices of rank 8, the same numbers in both programs. mlx-lm uses its own LoRA
layers. The kernels are those of MLX's CPU backend, so the ratios are not those of a Mac.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from bench.benchmark import Benchmark
from bench.charts import draw_lines
from bench.contenders import decoding
from bench.contenders.process import Contender, measure_interleaved
from bench.contenders.rollouts import RANK
from bench.measurement import Case, Measurement, Metric
from bench.tables import closing, side_by_side
from clotho.backend import SWITCH

NAME = "decode"
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
PEAK_NOTE = (
    "The fraction of peak counts all matrix operations of a contender, including prompts that it prefills repeatedly."
)
ADAPTER_TITLE = (
    "tokens per second with an adapter (rank 8 on every linear layer of the blocks) and without Clotho's CPU kernels "
    "(higher is better)"
)
THREADS = 2
ROWS = 32


def case(model: str, *, prompts: int = 4, group: int = 8, prompt_tokens: int = 128) -> Case:
    """One case; the defaults are the first case."""
    return {"model": model, "prompts": prompts, "group": group, "prompt_tokens": prompt_tokens, "new_tokens": 64}


ADAPTER: Case = {"adapter": f"rank {RANK}"}
"""What the cases with an adapter have besides the others. Clotho decodes them with MLX's kernels."""

UNEVEN: Case = case("6m", prompts=4 * ROWS, group=1, prompt_tokens=16) | {
    "new_tokens": 64,
    "longest": 1024,
    "at_once": ROWS,
}
"""The case with lognormal lengths."""

UNEVEN_TITLE = (
    f"tokens per second with lognormal lengths (median {UNEVEN['new_tokens']}, at most 1,024), {UNEVEN['prompts']} "
    f"completions, {ROWS} decoded together (higher is better)"
)

ADAPTED: tuple[Case, ...] = (
    case("6m") | ADAPTER,
    case("6m", prompts=ROWS, group=1) | ADAPTER,
    case("6m", prompt_tokens=512) | ADAPTER,
)

SWEEPS: tuple[Case, ...] = (
    *(case("6m", prompts=prompts) for prompts in (1, 2, 8, 16)),
    *(case("6m", prompts=ROWS // group, group=group) for group in (1, 4, 32)),
    *(case("6m", prompt_tokens=tokens) for tokens in (16, 512)),
)


def measure(repeats: int) -> list[Measurement]:
    """Measure all cases. The first case has all repeats, the larger model three, the others two."""
    three, two = min(3, repeats), min(2, repeats)
    peers = [OURS, MLX_LM, MLX_LM_LORA]
    return [
        *_interleaved([*peers, AS_CALLED], [case("6m")], repeats),
        *_interleaved(peers, [case("25m")], three),
        *with_threads([case("6m"), case("25m")], three),
        *_interleaved(peers, SWEEPS, two),
        *_interleaved([OURS, MLX_LM], [UNEVEN], three),
        *with_adapter(ADAPTED, three),
    ]


def measure_quickly() -> list[Measurement]:
    """Measure the first case once with the embedded policy."""
    return _interleaved([OURS, MLX_LM, MLX_LM_LORA], [case("embedded")], 1)


def with_adapter(cases: Sequence[Case], repeats: int) -> list[Measurement]:
    """Measure cases with an adapter, without the kernels of the CPU backend."""
    return _interleaved([replace(OURS, environment={SWITCH: "0"}), MLX_LM], cases, repeats)


def measure_adapter(repeats: int, quick: bool) -> list[Measurement]:
    """Measure the cases with an adapter; in quick mode the first case once with the embedded policy."""
    return with_adapter([case("embedded") | ADAPTER], 1) if quick else with_adapter(ADAPTED, repeats)


def measure_uneven(repeats: int, quick: bool) -> list[Measurement]:
    """Measure lognormal lengths; in quick mode a few completions once with the embedded policy."""
    few: Case = {"model": "embedded", "prompts": 4, "longest": 16, "at_once": 2}
    return _interleaved([OURS, MLX_LM], [UNEVEN | few if quick else UNEVEN], 1 if quick else repeats)


def with_threads(cases: Sequence[Case], repeats: int) -> list[Measurement]:
    """Measure with two BLAS threads; the case of each result says so."""
    environment = {"MKL_NUM_THREADS": str(THREADS)}
    found = _interleaved([replace(one, environment=environment) for one in (OURS, MLX_LM, MLX_LM_LORA)], cases, repeats)
    return [replace(one, case={**one.case, "blas_threads": THREADS}) for one in found]


def _interleaved(contenders: Sequence[Contender], cases: Sequence[Case], repeats: int) -> list[Measurement]:
    return measure_interleaved(NAME, contenders, cases, [RATE, PEAK], repeats=repeats)


def is_first(case: Case) -> bool:
    """Whether a case differs from the first case only in the model or the number of BLAS threads."""
    return (case["prompts"], case["group"], case["prompt_tokens"]) == (4, 8, 128) and "adapter" not in case


SWEEP_FILTERS: tuple[Callable[[Case], bool], ...] = (
    lambda case: (case["group"], case["prompt_tokens"]) == (8, 128),
    lambda case: (int(case["prompts"]) * int(case["group"]), case["prompt_tokens"]) == (ROWS, 128),
    lambda case: (case["prompts"], case["group"]) == (4, 8),
)
"""Which cases belong to each sweep: batch size, group size, prompt length."""


def sweep(results: Sequence[Measurement], belongs: Callable[[Case], bool]) -> list[Measurement]:
    """The cases of a sweep of the small model, in order, for contenders that completed all of them."""
    found = [one for one in results if one.case["model"] == "6m" and belongs(one.case) and _plain(one)]
    return sorted(found, key=lambda one: [int(one.case[key]) for key in ("group", "prompts", "prompt_tokens")])


def _plain(one: Measurement) -> bool:
    return "blas_threads" not in one.case and "adapter" not in one.case and one.contender != AS_CALLED.name


def table(results: Sequence[Measurement]) -> str:
    """The first case, its fraction of peak, the sweeps, and the cases with an adapter, as far as they were measured."""
    first = [one for one in results if is_first(one.case)]
    alone = [one for one in first if "blas_threads" not in one.case]
    threaded = [one for one in first if "blas_threads" in one.case]
    parts = []
    for found in (alone, threaded):
        if found:
            parts += [side_by_side(found, RATE.name), side_by_side(found, PEAK.name)]
    sweeps = [sweep(results, belongs) for belongs in SWEEP_FILTERS]
    parts += [side_by_side(found, RATE.name) for found in sweeps if len({str(one.case) for one in found}) > 1]
    notes = [PEAK_NOTE] if parts else []
    uneven = [one for one in results if "longest" in one.case]
    if uneven:
        parts.append(side_by_side(uneven, RATE.name, title=UNEVEN_TITLE))
    adapted = [one for one in results if "adapter" in one.case]
    if adapted:
        parts.append(side_by_side(adapted, RATE.name, title=ADAPTER_TITLE))
    return "\n\n".join([*parts, *notes, closing(results)])


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Draw tokens per second against the number of prompts.

    Raises ValueError if the number of prompts does not vary.
    """
    batches = sweep(results, SWEEP_FILTERS[0])
    title = "rollouts of 6m, 8 completions of 64 tokens per prompt of 128"
    draw_lines(batches, RATE.name, "prompts", target, title=title, logarithmic=True)


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=5,
    quick="measure the smallest case once",
    measure=lambda repeats, quick: measure_quickly() if quick else measure(repeats),
    table=table,
    parts={"adapter": measure_adapter, "uneven": measure_uneven},
)
read, main = BENCHMARK.read, BENCHMARK.main
