"""A reward model beside an independent computation, and beside the classifier of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from attachments.files.tests import hub_models
from attachments.files.tests.hub_models import PYTHON, python_with, run_jobs
from attachments.reward_model import NAME
from attachments.reward_model.classifier import open_classifier
from attachments.reward_model.network import Network, load
from attachments.reward_model.settings import NetworkSettings
from clotho.lanes.compute_thread import Compute
from clotho.models.parameters import flat
from clotho.rewards.registry import RewardOptions
from clotho.rewards.values import Completions, RewardError
from clotho.settings.model import ModelSection
from protocols.errors import ModelError, ProfileError
from protocols.prompt import Problem
from protocols.rollout import Discarded, ScoredGroup
from tests.e2e.pipeline_process import PROBLEMS, lines, run
from tests.training.policies_and_groups import scored_group
from training_run.memory.estimate import estimate_memory
from training_run.profile.data import RewardSection
from training_run.profile.load import load_profile
from training_run.rewards.runner import RewardRunner

pytestmark = pytest.mark.needs_float32

TEXTS = [[5, 9, 33, 2, 17, 60], [7], [40, 41, 42], [9] * 30, [5, 9, 33, 2, 17, 61]]


def classifier(directory: Path, architecture: str = "qwen3", *, labels: int = 1) -> Path:
    """Write a tiny sequence classifier in the form of the hub."""
    hub_models.save(directory, architecture)
    file = directory / "model.safetensors"
    weights: dict[str, Any] = dict(mx.load(str(file)))  # type: ignore[arg-type]
    width = weights["model.embed_tokens.weight"].shape[1]
    weights["score.weight"] = mx.random.normal((labels, width), key=mx.random.key(3))
    weights.pop("lm_head.weight", None)
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    name = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    names = {str(one): f"LABEL_{one}" for one in range(labels)}
    config |= {"architectures": [name], "id2label": names, "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def network(path: Path, **settings: Any) -> Network:
    """Load a reward model."""
    return Network(NetworkSettings(model=str(path), **settings))


@pytest.fixture
def compute() -> Iterator[Compute]:
    """Compute threads."""
    made = Compute(decode_share=0.5, slots=2)
    made.start()
    yield made
    made.stop()


def test_the_value_is_that_of_the_head_at_the_last_token(tmp_path: Path) -> None:
    """Of blocks that mlx-lm computes for one text alone, and a product in float64."""
    path = classifier(tmp_path / "rm")
    model: Any = load_model(hub_models.save(tmp_path / "plain", "qwen3"))[0]  # has the same blocks
    weights: Any = mx.load(str(path / "model.safetensors"))
    score_D = np.array(weights["score.weight"], dtype=np.float64)[0]
    expected = [float(np.array(model.model(mx.array([one]))[0, -1], dtype=np.float64) @ score_D) for one in TEXTS]
    assert network(path).values([tuple(text) for text in TEXTS]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("max_turn_ms", [0.0, 1e-3, 250.0])
def test_one_text_and_many_have_the_same_values(max_turn_ms: float, tmp_path: Path) -> None:
    """Whatever the number of texts of a forward pass, and into how many turns it is divided."""
    path = classifier(tmp_path / "rm")
    alone = network(path)
    expected = [alone.values([tuple(text)])[0] for text in TEXTS]
    for budget in (1, 64, 1024):
        found = network(path, micro_batch_tokens=budget, max_turn_ms=max_turn_ms)
        assert found.values([tuple(text) for text in TEXTS]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow  # transformers in an interpreter of its own
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_transformers_computes_the_same_values(architecture: str, tmp_path: Path) -> None:
    """Its sequence classifier, with all texts in one padded batch: within 1e-5."""
    python, path = python_with(PYTHON), classifier(tmp_path / "rm", architecture)
    job = {"kind": "values", "model": str(path), "out": str(tmp_path / "values.npy"), "texts": TEXTS}
    run_jobs(python, "hugging_face", [job], tmp_path)
    found = network(path).values([tuple(text) for text in TEXTS])
    assert found == pytest.approx(np.load(tmp_path / "values.npy").tolist(), rel=1e-5, abs=1e-5)


async def test_the_reward_reads_the_conversation_in_the_template_of_its_own_model(
    compute: Compute, tmp_path: Path
) -> None:
    """The messages of the problem and the completion as the answer; in the thread of scoring."""
    path = classifier(tmp_path / "rm")
    reward = load(RewardOptions(settings={"model": str(path)}))
    await reward.begin(compute)
    problem = Problem(prompt="2+2", messages=({"role": "user", "content": "2+2"},))
    found = await reward.score(Completions(problem=problem, texts=("4", "5")))
    own = network(path)
    texts = [own.tokenizer.encode(f"2+2{answer}") for answer in ("4", "5")]
    assert found == pytest.approx(own.values(texts), abs=1e-5)
    long = Completions(problem=problem, texts=("4" * 2000,))
    with pytest.raises(RewardError, match="context"):
        await reward.score(long)


async def test_it_is_one_term_of_the_weighted_sum(compute: Compute, tmp_path: Path) -> None:
    """Beside other functions; without compute threads nothing is loaded, and groups are discarded."""
    settings = {"model": str(classifier(tmp_path / "rm"))}
    runner = RewardRunner([RewardSection(name=NAME, weight=0.5, settings=settings), RewardSection(name="exact")])
    group = scored_group([[3, 4], [5]], [0.0, 0.0]).group
    texts = ("34", "5")
    group = type(group)(
        prompt=group.prompt,
        completions=tuple(
            type(one)(tokens=one.tokens, logprobs=one.logprobs, versions=one.versions, text=text, finish_reason="stop")
            for one, text in zip(group.completions, texts, strict=True)
        ),
    )
    await runner.start()
    before = await runner.score(group)
    assert isinstance(before, Discarded)
    assert before.reason == "reward_error"
    await runner.start(compute)
    after = await runner.score(group)
    assert isinstance(after, ScoredGroup)
    pairs = zip(after.parts[NAME], after.parts["exact"], strict=True)
    assert after.rewards == pytest.approx([0.5 * (value or 0.0) + (exact or 0.0) for value, exact in pairs])
    runner.close()


@pytest.mark.parametrize("settings", [{}, {"model": 3}, {"model": "x", "modle": "y"}])
def test_settings_that_are_not_valid_are_refused(settings: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(ProfileError, match="reward_model"):
        load(RewardOptions(settings=settings))


def test_a_model_that_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    """A language model, and a classifier with several labels."""
    for path in (hub_models.save(tmp_path / "plain", "qwen3"), classifier(tmp_path / "two", labels=2)):
        with pytest.raises(ModelError, match="reward model"):
            open_classifier(ModelSection(path=str(path)))


def test_it_computes_in_the_process_of_the_run(tmp_path: Path) -> None:
    """A cluster cannot compute it."""
    section = RewardSection(name=NAME, where="cluster", settings={"model": str(tmp_path)})
    with pytest.raises(ProfileError, match=r"rewards\.where"):
        RewardRunner([section])


def test_the_estimate_of_memory_counts_it(tmp_path: Path) -> None:
    """Its weights, without reading them."""
    path = classifier(tmp_path / "rm")
    rewards = ([{"name": "format"}], [{"name": NAME, "settings": {"model": str(path)}}])
    profiles = [load_profile("local-m3", {"rewards": one, "eval.type": "off"}) for one in rewards]
    off, on = (estimate_memory(profile.model, profile) for profile in profiles)
    model, _ = open_classifier(ModelSection(path=str(path)))
    assert on.base - off.base == sum(array.nbytes for array in flat(model.parameters()).values())


def test_a_run_learns_from_a_reward_model(tmp_path: Path) -> None:
    """The values are in the records of the rollouts."""
    reward = {"name": NAME, "settings": {"model": str(classifier(tmp_path / "rm"))}, "timeout_seconds": 60}
    result = run(
        tmp_path / "run", "--profile", "local-m3", "--steps", "2", "--rewards", json.dumps([reward]), "--server", "off",
        "--learner.batch-size", "2", "--sampling.group-size", "2", "--sampling.max-tokens", "8", "--eval", "off",
        "--data.train", str(PROBLEMS / "train.jsonl"), "--data.heldout", str(PROBLEMS / "heldout.jsonl"),
        small=(),
    )  # fmt: skip
    assert result.status == 0, result.err
    assert result.accounting.trained > 0
    groups = lines(tmp_path / "run" / "rollouts.jsonl")
    values = [one["parts"][NAME] for group in groups for one in group["completions"]]
    assert np.isfinite(values).all()
    assert len(set(values)) > 1
