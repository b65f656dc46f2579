"""`decode` and `first_token`: equal work for all contenders, and tables of their results."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from bench import decode, first_token
from bench.contenders import clotho_decode, clotho_first_token, decoding, mlx_lm_decode, mlx_lm_first_token
from bench.contenders.shapes import Shape, named_model, products, random_model, random_prompts
from bench.contenders.worker import Case, MeasureOnce
from bench.measurement import read
from bench.tables import unique
from clotho.backend import SWITCH
from tests.bench.made_measurements import Calls, made_up

TINY = Shape(layers=2, width=64, heads=2, key_heads=1, feed_forward=128, vocabulary=100)
SMALL: Case = {"model": "embedded", "prompts": 2, "group": 3, "prompt_tokens": 5, "new_tokens": 4}


@pytest.fixture(autouse=True)
def peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed peak of a million operations per second."""
    monkeypatch.setattr(decoding, "matrix_peak", lambda: 1e6)


@pytest.fixture
def measured_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces the measurement and records its arguments."""
    calls: Calls = []
    for question in (decode, first_token):
        monkeypatch.setattr(question, "measure_interleaved", made_up(calls))
    return calls


def arrays(model: Any) -> list[mx.array]:
    """All weights."""
    named: Any = tree_flatten(model.parameters())
    return [weight for _, weight in named]


def test_equal_seeds_give_equal_weights() -> None:
    """All contenders compute with the same weights in both environments."""
    one, same, other = (arrays(random_model(TINY, seed=seed)) for seed in (0, 0, 1))
    assert all(mx.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(mx.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_prompts_are_reproducible_and_distinct() -> None:
    """A prefilled prompt can only serve its own group."""
    prompts = random_prompts(4, 16, 100)
    assert prompts == random_prompts(4, 16, 100)
    assert len({tuple(prompt) for prompt in prompts}) == 4
    ready = decoding.work(SMALL)
    assert ready.repeated == [ready.prompts[0]] * 3 + [ready.prompts[1]] * 3


def test_products_count_the_matrix_weights() -> None:
    """Norms do not count, and tied embeddings count once, as the head."""
    queries_and_output, keys_and_values, feed_forward = 2 * 64 * 64, 2 * 64 * 32, 3 * 64 * 128
    assert products(random_model(TINY)) == (2 * (queries_and_output + keys_and_values + feed_forward), 100 * 64)


def test_the_embedded_policy_has_a_fixed_vocabulary() -> None:
    """Random shapes have any vocabulary."""
    assert named_model("embedded", vocabulary=384)[1]["vocab_size"] == 384
    with pytest.raises(ValueError, match="a vocabulary of 384, not 500"):
        named_model("embedded", vocabulary=500)


@pytest.mark.parametrize("prepare", [clotho_decode.prepare, mlx_lm_decode.prepare])
@pytest.mark.parametrize("more", [{}, {"longest": 9, "at_once": 2}], ids=["equal lengths", "lognormal lengths"])
def test_every_run_samples_the_tokens_of_the_case(prepare: Callable[[Case], MeasureOnce], more: Case) -> None:
    """The three metrics agree."""
    once = prepare(SMALL | more)
    for metrics in (once(), once()):
        assert metrics["tokens_per_second"] * metrics["microseconds_per_token"] == pytest.approx(1e6)
        assert metrics["peak_fraction"] > 0


def test_lognormal_lengths_have_the_median_and_the_maximum_of_the_case() -> None:
    """Equal for all contenders; without a maximum, all completions have as many tokens."""
    sampled = decoding.lengths(decode.UNEVEN)
    assert sampled == decoding.lengths(decode.UNEVEN)
    assert abs(statistics.median(sampled) - 64) < 10
    assert max(sampled) > 400
    assert max(decoding.lengths(decode.UNEVEN | {"longest": 99})) == 99
    assert decoding.lengths(decode.case("6m")) == [64] * 4


def test_missing_tokens_are_an_error() -> None:
    """A contender that samples fewer tokens reports no speed."""
    once = decoding.timed(decoding.work(SMALL), lambda: 23, prefilled=8)
    with pytest.raises(RuntimeError, match="23 tokens were sampled instead of 24"):
        once()


def test_the_fraction_of_peak_counts_two_operations_per_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt tokens do not pass the output head."""
    ready = decoding.work(SMALL)
    clock = iter([0.0, 2.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    weights = products(ready.model)
    operations = 2 * (weights.blocks * (8 + 24) + weights.head * 24)
    assert decoding.timed(ready, lambda: 24, prefilled=8)()["peak_fraction"] == pytest.approx(operations / 2 / 1e6)


@pytest.mark.parametrize("prepare", [clotho_first_token.prepare, mlx_lm_first_token.prepare])
def test_the_first_token_can_be_measured_repeatedly(prepare: Callable[[Case], MeasureOnce]) -> None:
    """The rest of the request is aborted after each run."""
    once = prepare({"model": "embedded", "prompt_tokens": 5})
    assert all(once()["seconds"] > 0 for _ in range(2))


def test_the_first_case_has_every_peer(measured_calls: Calls) -> None:
    """Each sweep has a table that includes the first case."""
    page = decode.table(decode.measure(5))
    titles = [line for line in page.splitlines() if line.startswith("**")]
    assert [title.startswith("**tokens per second") for title in titles] == [True, False, True, False, *[True] * 5]
    assert "clotho / mlx-lm-lora, as its trainer calls it" in page.splitlines()[2]
    sweeps = [decode.sweep(decode.measure(1), belongs) for belongs in decode.SWEEP_FILTERS]
    assert [[one.case for one in found].count(decode.case("6m")) for found in sweeps] == [6, 6, 6]
    assert [len({str(one.case) for one in found}) for found in sweeps] == [5, 4, 3]


def test_slow_cases_have_fewer_repeats(measured_calls: Calls) -> None:
    """The setting of mlx-lm-lora's trainer, the slowest, is measured in one case."""
    decode.measure(5)
    assert [repeats for _, _, repeats in measured_calls] == [5, 3, 3, 2, 3, 3]
    assert [len(cases) for contenders, cases, _ in measured_calls if decode.AS_CALLED in contenders] == [1]


def test_two_threads_are_set_in_the_environment_and_recorded_in_the_case(measured_calls: Calls) -> None:
    """Contender names stay the same, so that ratios exist."""
    found = decode.with_threads([decode.case("6m")], 1)
    assert [one.environment["MKL_NUM_THREADS"] for one in measured_calls[0][0]] == ["2"] * 3
    assert unique(one.contender for one in found) == ["clotho", "mlx-lm", "mlx-lm-lora"]
    assert all(one.case["blas_threads"] == 2 for one in found)


@pytest.mark.parametrize("question", [decode, first_token])
def test_quick_mode_writes_results_of_the_same_format(
    question: Any, measured_calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the table of these results."""
    path = tmp_path / "results.jsonl"
    assert question.main(["--quick", "--out", str(path)]) == 0
    assert capsys.readouterr().out == question.table(read(path)) + "\n"
    assert {repeats for _, _, repeats in measured_calls} == {1}


@pytest.mark.parametrize("question", [decode, first_token])
def test_results_can_be_drawn(question: Any, measured_calls: Calls, tmp_path: Path) -> None:
    """For docs/benchmark-tables.md."""
    pytest.importorskip("matplotlib")
    question.main(["--repeats", "1", "--out", str(tmp_path / "results.jsonl")])
    question.draw(read(tmp_path / "results.jsonl"), tmp_path / "image.svg")
    assert (tmp_path / "image.svg").read_text().startswith("<?xml")


def test_the_adapter_part_is_measured_without_cpu_kernels_beside_mlx_lm(measured_calls: Calls) -> None:
    """Groups of eight and of one. The cases belong to no sweep."""
    found = decode.measure_adapter(3, quick=False)
    ((contenders, cases, repeats),) = measured_calls
    assert [one.name for one in contenders] == ["clotho", "mlx-lm"]
    assert contenders[0].environment == {SWITCH: "0"}
    assert repeats == 3
    assert {(case["prompts"], case["group"]) for case in cases} == {(4, 8), (32, 1)}
    assert not any(decode.is_first(one.case) for one in found)
    assert not any(decode.sweep(found, belongs) for belongs in decode.SWEEP_FILTERS)


def test_lognormal_lengths_are_measured_beside_mlx_lm(measured_calls: Calls) -> None:
    """The case belongs to no sweep."""
    found = decode.measure_uneven(3, quick=False)
    ((contenders, cases, repeats),) = measured_calls
    assert ([one.name for one in contenders], repeats) == (["clotho", "mlx-lm"], 3)
    assert cases == [decode.UNEVEN]
    assert not any(decode.is_first(one.case) for one in found)
    assert not any(decode.sweep(found, belongs) for belongs in decode.SWEEP_FILTERS)


def test_one_part_replaces_its_own_results_only(measured_calls: Calls, tmp_path: Path) -> None:
    """`--only adapter` keeps the results of other cases in the file, and the table has both."""
    path = tmp_path / "results.jsonl"
    decode.main(["--quick", "--out", str(path)])
    before = read(path)
    for _ in range(2):
        assert decode.main(["--only", "adapter", "--quick", "--out", str(path)]) == 0
    after = read(path)
    assert list(after[: len(before)]) == list(before)
    assert {one.contender for one in after[len(before) :]} == {"clotho", "mlx-lm"}
    assert all("adapter" in one.case for one in after[len(before) :])
    assert len(after) == len(before) + 4
    assert "adapter" in decode.table(after)


@pytest.mark.usefixtures("device_path")
def test_both_contenders_decode_with_the_same_adapter() -> None:
    """The logits of Clotho's folded layers equal those of mlx-lm's LoRA layers, and differ from the base model's."""
    tokens_1_S = mx.arange(1, 7)[None]
    model, config = named_model("embedded")
    bare = model(tokens_1_S)
    ours = clotho_decode.policy_of(SMALL | decode.ADAPTER, model, config).model(tokens_1_S)
    other, _ = named_model("embedded")
    mlx_lm_decode.adapt(other)
    assert mx.allclose(ours, other(tokens_1_S), atol=1e-3).item()
    assert not mx.allclose(ours, bare, atol=0.1).item()
