"""The memory estimate against what MLX really held."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from attachments.alarms.sections import COLLAPSE_DETECTION, RollBackOnCollapse
from attachments.ranks.supervision import CONNECTION
from clotho.inference.engine import DecodeEngine
from clotho.models.loading import open_base
from clotho.models.policy import Policy, load_policy
from clotho.settings.bounds import Off
from clotho.settings.engine import EngineSection, SamplingSection
from clotho.settings.model import ModelSection, PolicySection
from clotho.settings.server import AdaptersSection, HttpServer
from clotho.training.update import PolicyLearner
from protocols.errors import ModelError
from protocols.sampling import SampleRequest, Sampling
from tests.learner_settings import learner_settings, policy_settings
from tests.models.test_blocked_attention import in_blocks
from tests.models.test_loading import arrays
from tests.saved_models import CONFIG, UNTIED, save
from tests.small_models import ARCHITECTURES, NEWER, SCANNED, WIDE, WIDER
from tests.test_architectures import saved as saved_architecture
from tests.training.policies_and_groups import scored_group
from training_run.evaluation.held_out import PinnedSampler
from training_run.memory.estimate import (
    SHAPES,
    converted_bytes,
    estimate_memory,
    open_shape,
    serving_memory,
    shipped_shape,
)
from training_run.profile.data import DataSection, RewardSection
from training_run.profile.load import load_profile
from training_run.profile.schema import HeldOutEvaluation, MemorySection, Profile

pytestmark = pytest.mark.needs_float32

PROMPT, COMPLETION, GROUPS, SIZE = 16, 49, 2, 8
MOST_ABOVE_PEAK = 1.5
MODEL = CONFIG | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 320}
ADAPTER, FULL = policy_settings(rank=8), policy_settings(kind="full")


UNDIVIDED = {"batch_size": GROUPS, "micro_batch_tokens": 512, "layout": "padded", "max_turn_ms": 0.0}


def profile_of(directory: Path, policy: PolicySection, **learner: Any) -> Profile:
    """One update of two groups of eight, in two micro-batches; nothing but those rows is decoded.

    Turns are not divided, because an evaluation in parts needs less memory.
    """
    return Profile(
        model=ModelSection(path=str(directory), dtype="float32"),
        data=DataSection(train="train.jsonl"),
        rewards=(RewardSection(name="exact"),),
        policy=policy,
        sampling=SamplingSection(max_tokens=COMPLETION, group_size=SIZE),
        learner=learner_settings(
            **{"batch_size": GROUPS, "micro_batch_tokens": 512, "layout": "padded", "max_turn_ms": 0.0, **learner}
        ),
        engine=EngineSection(max_num_seqs=GROUPS * SIZE, prefix_cache_tokens=0),
        server=Off(),
    )


def saved(tmp_path: Path, **config: Any) -> Path:
    """A Qwen3 whose blocks outweigh the noise of small buffers."""
    return save(tmp_path, MODEL | config)


def weights(profile: Profile) -> int:
    """Bytes of the trained weights, without the converted adapter of the device path."""
    policy = load_policy(profile.model, profile.policy, seed=0, keep_reference=False)
    return estimate_memory(profile.model, profile).trained - converted_bytes(policy.model, mx.float32.size)


def decode_all_but_the_end(policy: Policy, profile: Profile) -> DecodeEngine:
    """Fill the engine's caches: all rows of the batch, stopped shortly before their last tokens."""
    engine = DecodeEngine(policy, profile.engine)
    sampling = Sampling(max_tokens=COMPLETION, ignore_eos=True)
    for group in range(GROUPS):
        prompt = (3 + group,) * PROMPT
        engine.submit(SampleRequest(prompt=prompt, sampling=sampling, seeds=tuple(range(SIZE))), lambda _: None)
    for _ in range(COMPLETION - 4):
        engine.tick()
    assert engine.running == GROUPS * SIZE
    return engine


def peak_of_a_run(profile: Profile) -> int:
    """Most bytes held while a policy is loaded, decodes, and is updated twice with the caches still there."""
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    policy = load_policy(profile.model, profile.policy, seed=0, keep_reference=profile.learner.reference is not None)
    engine = decode_all_but_the_end(policy, profile)
    learner = PolicyLearner(policy, profile.learner, profile.sampling, steps=2)
    rewards = [float(i % 2) for i in range(SIZE)]
    groups = [scored_group([[5] * COMPLETION] * SIZE, rewards, prompt=[4] * PROMPT) for _ in range(GROUPS)]
    for step in range(2):
        update = learner.update(groups)
        policy.publish(update.parameters, version=update.version, step=step, fingerprint=update.fingerprint)
    peak: int = mx.get_peak_memory() - before
    assert engine.running == GROUPS * SIZE
    return peak


def estimate_by_peak(
    directory: Path, architecture: str, *, grad_checkpoint: bool = False, completion: int = COMPLETION
) -> float:
    """Return the estimate of what is computed, divided by the peak while a policy is loaded and updated once.

    Nothing is decoded and no checkpoint is written.
    """
    context = {"max_position_embeddings": 2048, "model_max_length": 2048}
    model = saved_architecture(directory, architecture, **(WIDE | WIDER.get(architecture, {}) | context))
    policy_section = policy_settings(rank=8, grad_checkpoint=grad_checkpoint)
    profile = profile_of(model, policy_section, batch_size=1, micro_batch_tokens=1024)
    sampling = SamplingSection(max_tokens=completion, group_size=SIZE)
    profile = msgspec.structs.replace(profile, sampling=sampling)
    estimate = estimate_memory(profile.model, profile, prompt_tokens=PROMPT)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    policy = load_policy(profile.model, profile.policy, seed=0, keep_reference=False)
    learner = PolicyLearner(policy, profile.learner, profile.sampling, steps=1)
    rewards = [float(row % 2) for row in range(SIZE)]
    learner.update([scored_group([[5] * completion] * SIZE, rewards, prompt=[4] * PROMPT)])
    peak: int = mx.get_peak_memory() - before
    return (estimate.total - estimate.caches - estimate.padded - estimate.routes) / peak


@pytest.mark.slow
@pytest.mark.parametrize("grad_checkpoint", [False, True])
@pytest.mark.parametrize("architecture", sorted((ARCHITECTURES.keys() | NEWER.keys()) - SCANNED))
def test_the_estimate_of_an_update_is_1_to_1_3_times_the_peak(
    tmp_path: Path, architecture: str, grad_checkpoint: bool
) -> None:
    """Other norms, gates and attention, experts, and short convolutions."""
    assert 1.0 <= estimate_by_peak(tmp_path, architecture, grad_checkpoint=grad_checkpoint) <= 1.3


DEEP = {"num_hidden_layers": 20, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
"""The proportions of SmolLM2-135M: many narrow blocks, whose caches are larger than anything else."""

RUNS: dict[str, tuple[PolicySection, dict[str, Any], dict[str, Any]]] = {
    "adapter": (ADAPTER, {}, {}),
    "adapter, blocks checkpointed": (policy_settings(rank=8, grad_checkpoint=True), {}, {}),
    "adapter, prompts shared": (ADAPTER, {"layout": "shared"}, {}),
    "adapter, rows packed": (ADAPTER, {"layout": "packed"}, {}),
    "adapter, head in pieces": (ADAPTER, {}, {"vocab_size": 20_000}),
    "adapter on half of twenty narrow blocks": (policy_settings(rank=8, num_layers=10, grad_checkpoint=True), {}, DEEP),
    "dora": (policy_settings(rank=8, kind="dora"), {}, {}),
    "embeddings beside the adapter": (policy_settings(rank=8, train_embeddings=True), {}, {"vocab_size": 4096}),
    "all weights": (FULL, {}, {}),
    "all weights, two steps an update": (FULL, {"num_minibatches": 2, "optimizer": "lion"}, {}),
    "all weights, averaged reference": (FULL, {"kl_beta": 0.1, "reference": "average", "optimizer": "adafactor"}, {}),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_estimate_is_never_below_the_peak_and_at_most_1_5_times_it(tmp_path: Path, run: str) -> None:
    """The peak is MLX's own over loading, decoding with full caches and two updates."""
    policy, learner, config = RUNS[run]
    profile = profile_of(saved(tmp_path, **config), policy, **learner)
    estimate = estimate_memory(profile.model, profile, prompt_tokens=PROMPT)
    measured = peak_of_a_run(profile)
    assert measured <= estimate.total <= MOST_ABOVE_PEAK * measured


@pytest.mark.parametrize(("layout", "grad_checkpoint"), [("padded", False), ("shared", True)])
def test_attention_in_blocks_of_queries_is_estimated_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, grad_checkpoint: bool
) -> None:
    """Long rows, whose scores exist for one block at a time: less than in one piece."""
    profile = profile_of(saved(tmp_path), policy_settings(rank=8, grad_checkpoint=grad_checkpoint), layout=layout)
    in_one_piece = estimate_memory(profile.model, profile, prompt_tokens=PROMPT)
    in_blocks(monkeypatch, queries=16)
    estimate = estimate_memory(profile.model, profile, prompt_tokens=PROMPT)
    measured = peak_of_a_run(profile)
    assert measured <= estimate.total <= MOST_ABOVE_PEAK * measured
    assert estimate.activations < in_one_piece.activations


def test_the_minimum_counts_the_cache_of_one_sequence(tmp_path: Path) -> None:
    """The number of rows changes `total` and leaves `minimum` as it is."""
    profile = profile_of(saved(tmp_path), ADAPTER)
    fewer = msgspec.structs.replace(profile, engine=EngineSection(max_num_seqs=4, prefix_cache_tokens=0))
    many, few = (estimate_memory(each.model, each) for each in (profile, fewer))
    assert many.one_sequence * GROUPS * SIZE == many.caches
    assert many.total > few.total > few.minimum == many.minimum


def test_the_rows_of_http_clients_beside_rollouts_are_counted(tmp_path: Path) -> None:
    """With the HTTP server, an eighth more rows than `engine.max_num_seqs` can be decoded."""
    profile = profile_of(saved(tmp_path), ADAPTER)
    served = msgspec.structs.replace(profile, server=HttpServer())
    alone, beside = (estimate_memory(each.model, each).caches for each in (profile, served))
    assert beside * 8 == alone * 9


def test_an_evaluation_during_training_has_caches_of_its_own(tmp_path: Path) -> None:
    """As many rows as the engine allows, if there are as many problems. The peak is MLX's own, with both full."""
    evaluated = HeldOutEvaluation(interval=1, problems_between=GROUPS * SIZE)
    profile = msgspec.structs.replace(profile_of(saved(tmp_path, **DEEP), ADAPTER), eval=evaluated)
    estimate = estimate_memory(profile.model, profile, prompt_tokens=PROMPT)
    assert estimate.evaluation == estimate.caches
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    policy = load_policy(profile.model, profile.policy, seed=0, keep_reference=False)
    engine = decode_all_but_the_end(policy, profile)
    alone = mx.get_peak_memory() - before
    sampling = Sampling(max_tokens=COMPLETION, ignore_eos=True)
    prompt = (3,) * PROMPT
    requests = [SampleRequest(prompt=prompt, sampling=sampling, seeds=(row,)) for row in range(GROUPS * SIZE)]
    PinnedSampler(policy, profile.engine).completions(policy.trainable(), requests, version=0)
    peak = mx.get_peak_memory() - before
    assert engine.running == GROUPS * SIZE
    assert alone + estimate.evaluation // 2 < peak <= estimate.held + estimate.decode + estimate.margin
    few = msgspec.structs.replace(profile, eval=HeldOutEvaluation(interval=1, problems=2, samples=1))
    none = msgspec.structs.replace(profile, eval=HeldOutEvaluation(interval=0))
    rows = [estimate_memory(each.model, each, prompt_tokens=PROMPT).evaluation for each in (few, none)]
    assert rows == [4 * estimate.one_sequence, 0]


def test_adapters_that_clients_may_load_are_counted(tmp_path: Path) -> None:
    """Up to `max_bytes`, or the largest adapters that the other limits allow; with their copies in the compute type."""
    profile = profile_of(saved(tmp_path), ADAPTER)

    def adapters(**limits: Any) -> int:
        section = AdaptersSection(**limits)
        served = msgspec.structs.replace(profile, server=HttpServer(adapters=section))
        estimate = estimate_memory(served.model, served)
        if section.root:
            alone = serving_memory(profile.model, profile.engine, profile.sampling, section)
            assert estimate.adapters == alone.adapters
            assert alone.total - alone.minimum > alone.adapters
        return estimate.adapters

    assert adapters() == 0
    assert adapters(root="adapters", max_bytes=1000) == 4 * 1000
    smaller = adapters(root="adapters", max_loaded=2, max_rank=8)
    assert smaller * 4 == adapters(root="adapters", max_loaded=4, max_rank=16) > 0


def test_nothing_is_read_to_make_an_estimate(tmp_path: Path) -> None:
    """Weights stay in their files: the arrays held during the estimate are a small part of those described."""
    profile = profile_of(saved(tmp_path), FULL)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    estimate = estimate_memory(profile.model, profile)
    assert mx.get_peak_memory() - before < estimate.trained / 20


@pytest.mark.parametrize("dequantize", [False, True])
def test_weights_count_as_they_will_be_after_loading(tmp_path: Path, dequantize: bool) -> None:
    """Base and trained weights, after dequantising and casting, are exactly the bytes that the loaded policy holds.

    The adapter counts twice: in float32, and in the compute type of the decode engine.
    """
    profile = profile_of(save(tmp_path, bits=4, dtype=mx.bfloat16), policy_settings(rank=4))
    section = ModelSection(path=str(tmp_path), dtype="float16", dequantize=dequantize)
    estimate = estimate_memory(section, profile)
    policy = load_policy(section, profile.policy, seed=0, keep_reference=False)
    converted = converted_bytes(policy.model, mx.float16.size)
    assert converted > 0
    assert estimate.base + estimate.trained == policy.description.bytes + converted
    assert estimate.quantized is not dequantize


def test_a_reference_is_counted_only_where_one_is_kept(tmp_path: Path) -> None:
    """The base's is there anyway beside an adapter; the learner's first or averaged weights are kept for a penalty."""
    directory = saved(tmp_path)

    def reference(policy: PolicySection, **learner: Any) -> int:
        profile = profile_of(directory, policy, **learner)
        return estimate_memory(profile.model, profile).reference

    full, adapter = weights(profile_of(directory, FULL)), weights(profile_of(directory, ADAPTER))
    assert reference(FULL, kl_beta=0.1) == full > adapter
    assert reference(ADAPTER, kl_beta=0.1, reference="snapshot") == adapter > 0
    assert reference(ADAPTER, kl_beta=0.1, reference="average") == adapter
    assert reference(FULL) == reference(ADAPTER, kl_beta=0.1) == 0
    assert reference(FULL, kl_beta=0.1, reference="environment") == 0


def test_the_optimizers_state_is_what_it_will_be(tmp_path: Path) -> None:
    """AdamW keeps two numbers for each weight, lion and sgd one, adafactor rows and columns."""
    directory = saved(tmp_path)

    def state(optimizer: str) -> float:
        profile = profile_of(directory, FULL, optimizer=optimizer)
        estimate = estimate_memory(profile.model, profile)
        return estimate.optimizer / estimate.trained

    assert [round(state(kind), 3) for kind in ("adamw", "lion", "sgd")] == [2.0, 1.0, 1.0]
    assert 0.0 < state("adafactor") < 0.05
    assert 1.0 < state("muon") < 1.1


@pytest.mark.parametrize("reference", [{"reference": "average"}, {"reference": "snapshot", "reference_interval": 5}])
def test_going_back_keeps_two_older_versions(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Weights, optimizer state and a reference that moves, each twice; nothing where a collapse only stops the run."""
    profile = profile_of(saved(tmp_path), FULL, kl_beta=0.1, **reference)
    stopping = estimate_memory(profile.model, profile)
    rolling = COLLAPSE_DETECTION.put(profile, RollBackOnCollapse())
    kept = stopping.trained + stopping.optimizer + stopping.reference
    assert stopping.rollback == 0
    assert estimate_memory(profile.model, rolling).rollback == 2 * kept


def test_several_ranks_hold_copies_of_a_gradient_while_it_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as a turn of their own."""
    profile = profile_of(saved(tmp_path), FULL)
    alone = estimate_memory(profile.model, profile)
    monkeypatch.setenv(CONNECTION, "0")
    together = estimate_memory(profile.model, profile)
    assert (alone.sums, together.sums) == (0, 3 * weights(profile))
    assert together.turn == max(alone.turn, together.sums)


def test_settings_move_the_parts_they_are_named_for(tmp_path: Path) -> None:
    """Fewer rows shrink caches, checkpointing and smaller micro-batches activations, fewer blocks the adapter."""
    directory = saved(tmp_path)
    profile = profile_of(directory, policy_settings(rank=8))
    usual = estimate_memory(profile.model, profile)

    def changed(**sections: msgspec.Struct) -> Profile:
        return msgspec.structs.replace(profile, **sections)

    fewer = estimate_memory(profile.model, changed(engine=EngineSection(max_num_seqs=4, prefix_cache_tokens=100)))
    assert fewer.caches * 4 == usual.caches
    assert fewer.prefixes > usual.prefixes == 0
    checkpointed = estimate_memory(profile.model, changed(policy=policy_settings(rank=8, grad_checkpoint=True)))
    assert checkpointed.activations < usual.activations
    smaller = estimate_memory(
        profile.model, changed(learner=learner_settings(batch_size=GROUPS, micro_batch_tokens=330, layout="padded"))
    )
    assert smaller.activations < usual.activations
    assert smaller.logits < usual.logits
    last = estimate_memory(profile.model, changed(policy=policy_settings(rank=8, num_layers=1)))
    assert last.trained * 4 == usual.trained
    assert last.activations < usual.activations
    kept = estimate_memory(profile.model, changed(memory=MemorySection(cache_limit_mib=7)))
    assert (kept.freed, kept.total) == (7 * 2**20, usual.total)


def test_a_model_of_the_hub_that_is_not_here_is_refused_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says how to fetch it; a dry run never downloads."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    profile = profile_of(tmp_path, ADAPTER)
    with pytest.raises(ModelError, match="hf download organisation/name") as caught:
        estimate_memory(ModelSection(path="organisation/name"), profile)
    assert "\n" not in str(caught.value)


def test_a_model_whose_shape_ships_needs_neither_the_hub_nor_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-14B in 4 bits: its weights would be 8.3 GB, its estimate holds nothing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    section = ModelSection(path="mlx-community/Qwen3-14B-4bit", dtype="bfloat16")
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    estimate = estimate_memory(section, profile_of(tmp_path, ADAPTER))
    assert mx.get_peak_memory() - before < 2**20
    assert estimate.shipped_shape
    assert estimate.quantized
    assert estimate.base == 8_307_783_680


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """The same one line as at the start of a run."""
    profile = profile_of(tmp_path, ADAPTER)
    with pytest.raises(ModelError, match="does not exist"):
        estimate_memory(ModelSection(path=str(tmp_path / "missing")), profile)


@pytest.mark.parametrize("section", [{"dtype": "bfloat16"}, {"dtype": "float32", "dequantize": True}])
@pytest.mark.parametrize("bits", [0, 4])
def test_a_configuration_gives_the_shapes_of_the_files(tmp_path: Path, bits: int, section: dict[str, object]) -> None:
    """With and without quantization and conversion. Only the values are missing."""
    model = ModelSection(path=str(tmp_path), **section)  # type: ignore[arg-type]
    save(tmp_path, UNTIED | {"torch_dtype": "bfloat16"}, bits=bits, dtype=mx.bfloat16)
    expected, _ = open_base(tmp_path, model)
    found, config = open_shape(tmp_path, model)
    assert arrays(found) == arrays(expected)
    assert config["vocab_size"] == UNTIED["vocab_size"]


@pytest.mark.parametrize("directory", sorted(SHAPES.iterdir()), ids=lambda path: path.name)
def test_every_shipped_configuration_builds_a_model(directory: Path) -> None:
    """OWNER--NAME stands for the repository OWNER/NAME."""
    repository = directory.name.replace("--", "/")
    assert shipped_shape(repository) == directory
    model, config = open_shape(directory, ModelSection(path=repository))
    assert len(model.layers) == config.get("text_config", config)["num_hidden_layers"]


def test_unknown_repositories_have_no_shape() -> None:
    """Neither unknown names nor directories of the project."""
    assert shipped_shape("organisation/name") is None
    assert shipped_shape("") is None


def test_a_temperature_takes_no_memory() -> None:
    """Of the parameters of sampling, only those count that work with arrays of the size of the logits."""
    warm, cold = (load_profile("local-m3", {"sampling.temperature": one}) for one in (1.0, 0.7))
    assert estimate_memory(warm.model, warm) == estimate_memory(cold.model, cold)
