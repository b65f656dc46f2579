"""The command `eval`: base and adapter side by side, and the JSON file with every completion."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from protocols.evaluation import Estimate
from training_run.__main__ import main
from training_run.commands.evaluate import Evaluation, show
from training_run.evaluation.accuracy import Comparison

EMBEDDED = Path(__file__).parents[3] / "profiles" / "embedded"
GIVEN = ["eval", "--profile", "local-m3", "--limit", "12"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the embedded policy that changes nothing: B is zero."""
    directory = tmp_path_factory.mktemp("adapter")
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": {"rank": 2, "scale": 1.0, "dropout": 0.0}}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    layer, model = "model.layers.0.self_attn.q_proj", json.loads((EMBEDDED / "config.json").read_text())
    outputs = model["num_attention_heads"] * model["head_dim"]
    arrays = {f"{layer}.lora_a": mx.ones((model["hidden_size"], 2)), f"{layer}.lora_b": mx.zeros((2, outputs))}
    mx.save_safetensors(str(directory / "adapters.safetensors"), arrays)
    return directory


@pytest.fixture(scope="module")
def written(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output file of one evaluation of the base model and an adapter."""
    path = tmp_path_factory.mktemp("eval") / "found.json"
    flags = ["--samples", "3", "--sampling.max-tokens", "24", "--adapter", f"same={adapter}", "--output", str(path)]
    assert main([*GIVEN, *flags]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_results_agree_with_a_count_over_the_completions(written: dict[str, Any]) -> None:
    """Greedy accuracy overall and by type, avg@k, pass@k and truncation, counted from the records."""
    for policy in written["policies"].values():
        records = policy["records"]
        assert len(records) == written["problems"] == 12
        right = [record["greedy"]["correct"] for record in records]
        assert policy["greedy"]["overall"]["value"] == pytest.approx(sum(right) / 12)
        for kind, share in policy["greedy"]["by_type"].items():
            chosen = [record["greedy"]["correct"] for record in records if record["type"] == kind]
            assert share["value"] == pytest.approx(sum(chosen) / len(chosen))
        samples = [[sample["correct"] for sample in record["samples"]] for record in records]
        assert {len(found) for found in samples} == {3}
        assert policy["avg"]["overall"]["value"] == pytest.approx(sum(map(sum, samples)) / 36)
        assert policy["pass_at"]["3"]["overall"]["value"] == pytest.approx(sum(map(any, samples)) / 12)
        assert policy["truncated"] == pytest.approx(sum(r["greedy"]["truncated"] for r in records) / 12)
        greedy = [record["greedy"] for record in records]
        assert policy["reward"]["value"] == pytest.approx(sum(one["reward"] for one in greedy) / 12)
        assert policy["rewards"]["format"]["value"] == pytest.approx(
            sum(one["rewards"]["format"] for one in greedy) / 12
        )
        assert policy["completion_length"] == pytest.approx(sum(one["tokens"] for one in greedy) / 12)
        sampled = [sample["reward"] for record in records for sample in record["samples"]]
        assert policy["sampled_reward"]["value"] == pytest.approx(sum(sampled) / 36)
        assert (policy["loss"], policy["failed"]) == (None, 0)


def test_an_adapter_without_effect_equals_the_base_model(written: dict[str, Any]) -> None:
    """Greedy and sampled completions depend on weights, prompt and seeds alone; the difference is 0."""
    base, same = written["policies"]["base"], written["policies"]["same"]
    assert base["records"] == same["records"]
    assert base["comparison"] is None
    found = same["comparison"]
    assert (found["gained"], found["lost"], found["p_value"]) == (0, 0, 1.0)
    for difference in (found["accuracy"], found["reward"], found["avg"], found["pass_at"]["2"]):
        assert (difference["value"], difference["problems"]) == (0.0, 12)


def test_every_difference_to_the_base_model_is_printed(written: dict[str, Any]) -> None:
    """Those of shares in points, those of rewards and losses as they are."""

    def estimate(value: float) -> Estimate:
        return Estimate(value=value, low=-1.0, high=1.0, problems=12)

    found = msgspec.convert(written, Evaluation)
    compared = Comparison(
        accuracy=estimate(0.011),
        gained=71,
        lost=72,
        p_value=0.073,
        reward=estimate(0.014),
        rewards={},
        loss=estimate(0.015),
        avg=estimate(0.016),
        pass_at={"2": estimate(0.018), "3": estimate(0.019)},
    )
    same = replace(found.policies["same"], comparison=compared)
    printed = io.StringIO()
    show(Console(file=printed, width=200), replace(found, policies=found.policies | {"same": same}), as_json=False)
    for figure in ("+1.1 ", "71 ", "72 ", "0.073", "+0.014", "+0.015", "+1.6 ", "+1.8 ", "+1.9 "):
        assert figure in printed.getvalue()


def test_the_loss_of_reference_completions_is_measured(
    adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the base model and of an adapter, for problems with a reference completion."""
    answer = "<think>5 + 2 = 7</think><answer>7</answer>"
    records = [
        {"prompt": "What is 5 + 2?", "answer": "7", "completion": answer},
        {"prompt": "What is 1 + 2?", "answer": "3"},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    flags = [
        "--dataset",
        str(tmp_path / "data.jsonl"),
        "--data.heldout",
        "",
        "--part",
        "all",
        "--adapter",
        f"same={adapter}",
    ]
    assert main(["eval", "--profile", "local-m3", *flags, "--sampling.max-tokens", "8", "--json"]) == 0
    policies = json.loads(capfd.readouterr().out)["policies"]
    base, same = policies["base"], policies["same"]
    assert base["loss"]["problems"] == 1
    assert 0 < base["loss"]["value"] < 5
    assert same["loss"]["value"] == pytest.approx(base["loss"]["value"], rel=1e-4)
    assert same["comparison"]["loss"]["value"] == pytest.approx(0.0, abs=1e-4)


def test_results_are_printed_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Without the completions, and with nothing else on standard output."""
    assert main([*GIVEN, "--sampling.max-tokens", "8", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["policies"]["base"]["records"] == []
    assert found["policies"]["base"]["greedy"]["problems"] == 12


@pytest.mark.parametrize(
    "words",
    [
        ["--output", str(EMBEDDED / "config.json")],
        ["--output", "nowhere/x.json"],
        ["--adapter", "profiles"],
        ["--data.heldout", "nowhere.jsonl"],
        ["--rewards", "format"],
        ["--sampling.max-tokens", "1000000"],
    ],
    ids=" ".join,
)
def test_input_that_cannot_be_used_is_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The exit status is 2. Nothing is printed on standard output; a line before says what is being loaded."""
    assert main([*GIVEN, *words]) == 2
    out, err = capfd.readouterr()
    loading, complaint = err.splitlines()
    assert (out, loading.startswith("loading "), complaint.startswith("clotho: ")) == ("", True, True)
