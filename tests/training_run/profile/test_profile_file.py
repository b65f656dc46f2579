"""Loading profiles: layers, paths, errors on one line, and the way back to TOML."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from attachments.reasoning_gym.sections import TABLES, GymSection
from clotho.extension import Door
from clotho.settings.learner import AdamW, AverageReference, ConstantSchedule, Lion, Muon, RewardKLPenalty
from clotho.settings.model import Dora, Lora
from clotho.settings.objectives import (
    Custom,
    DrGrpo,
    Grpo,
    MaskCorrection,
    MeanAdvantage,
    PpoDecoupled,
    RejectSequenceCorrection,
)
from protocols.errors import ProfileError
from training_run.profile.aliases import PROFILE_NAMES
from training_run.profile.load import (
    PROFILES,
    changed_toml,
    decode,
    file_layers,
    load_profile,
    merge,
    resolved_toml,
    write_profile,
)

SHIPPED = sorted(PROFILES.glob("*.toml"))

MINIMAL = """
[model]
path = "base"
[data]
train = "train.jsonl"
[[rewards]]
name = "exact"
correct = true
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(directory: Path, text: str, name: str = "x.toml") -> str:
    """A profile file, as it is given on the command line."""
    (directory / name).write_text(text, encoding="utf-8")
    return f"./{name}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_profile_states_nothing_that_holds_without_it(path: Path) -> None:
    """Each setting differs from the default and from the profile below; a type may repeat what other keys imply."""
    *below, top = file_layers(path)
    whole = decode(merge([*below, top]))
    for key in top.values:
        rest = top._replace(values={other: value for other, value in top.values.items() if other != key})
        with suppress(ProfileError):  # a required key, or one that another key needs
            assert key.endswith(".type") or decode(merge([*below, rest])) != whole, key


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_profile_is_valid_and_returns_from_toml_unchanged(path: Path, here: Path) -> None:
    """In both forms: resolved, and with the settings that differ from the defaults only, in arrays of tables too."""
    profile = load_profile(path.stem)
    resolved, changed = resolved_toml(profile), changed_toml(profile)
    assert load_profile(written(here, resolved)) == load_profile(written(here, changed)) == profile
    assert profile.run_dir == f"runs/{path.stem}"
    assert len(changed.splitlines()) < 80 < len(resolved.splitlines())
    assert "timeout_seconds" not in changed


def test_a_profile_works_from_any_directory(here: Path) -> None:
    """Paths that start with ./ belong to the profile's file, not to whoever calls."""
    profile = load_profile("local-m3")
    assert profile.model.path == str(PROFILES / "embedded")
    assert profile.data.train == str(PROFILES / "embedded" / "train.jsonl")


def test_paths_are_the_files_or_the_callers(here: Path) -> None:
    """`./x` and what exists beside the file belong to the file; other data to the caller; other models to the hub."""
    (here / "profiles").mkdir()
    (here / "profiles" / "beside.jsonl").touch()
    text = MINIMAL.replace("train.jsonl", "beside.jsonl").replace("[[rewards]]", 'heldout = "far.jsonl"\n[[rewards]]')
    profile = load_profile(written(here / "profiles", text, "p.toml").replace("./", "profiles/"))
    assert profile.model.path == "base"
    assert profile.data.train == str(here / "profiles" / "beside.jsonl")
    assert profile.data.heldout == str(here / "far.jsonl")
    by_flag = load_profile("local-m3", {"model.path": "./mine", "data.train": "my.jsonl"})
    assert by_flag.model.path == str(here / "mine")
    assert by_flag.data.train == str(here / "my.jsonl")


def test_files_of_functions_are_the_profiles_or_the_callers(here: Path) -> None:
    """`./file.py:name` and a file beside the profile belong to the profile; in flags, to the working directory."""
    folder = here / "profiles"
    folder.mkdir()
    (folder / "beside.py").touch()
    names = {
        "./score.py:f": str(folder / "score.py:f"),
        "../score.py:f": str(here / "score.py:f"),
        "beside.py:f": str(folder / "beside.py:f"),
        "/opt/score.py:f": "/opt/score.py:f",
        "elsewhere.py:f": "elsewhere.py:f",
        "package.module:f": "package.module:f",
    }
    for name, expected in names.items():
        text = MINIMAL.replace("exact", name) + f'[agent]\ntype = "python"\nenvironment = "{name}"\n'
        path = written(folder, text, "p.toml").replace("./", "profiles/")
        profile: Any = load_profile(path)
        assert profile.rewards[0].name == expected
        assert profile.agent.environment == expected
    for name, expected in {"./score.py:f": str(here / "score.py:f"), "score.py:f": "score.py:f"}.items():
        (reward,) = load_profile(written(here, MINIMAL), {"rewards": [{"name": name, "correct": True}]}).rewards
        assert reward.name == expected


def test_a_dataset_of_the_hub_keeps_its_name(here: Path) -> None:
    """A name OWNER/NAME without the suffix of a file; an existing file of this name is preferred."""
    assert load_profile(written(here, MINIMAL), {"data.train": "owner/name"}).data.train == "owner/name"
    for file in ("owner/name.jsonl", "owner/name/deep", "name"):
        assert load_profile(written(here, MINIMAL), {"data.train": file}).data.train == str(here / file)
    (here / "owner").mkdir()
    (here / "owner" / "name").touch()
    assert load_profile(written(here, MINIMAL), {"data.train": "owner/name"}).data.train == str(here / "owner/name")


def test_a_dataset_of_reasoning_gym_brings_its_own_reward(here: Path) -> None:
    """Unless the layer that names it lists rewards. Another dataset of the gym keeps the rewards of the first one."""
    profile = written(here, MINIMAL)
    gym = load_profile(profile, {"data.train": "reasoning_gym:gcd,lcm"})
    assert gym.data.train == "reasoning_gym:gcd,lcm"
    assert [(reward.name, reward.correct) for reward in gym.rewards] == [("reasoning_gym", True)]
    listed = {"data.train": "reasoning_gym:gcd", "rewards": [{"name": "exact", "correct": True}]}
    assert [reward.name for reward in load_profile(profile, listed).rewards] == ["exact"]
    table = "[[data.reasoning_gym]]\ndataset = 'gcd'\n[[rewards]]"
    above = written(here, MINIMAL.replace("train.jsonl", "reasoning_gym:gcd").replace("[[rewards]]", table), "y.toml")
    assert TABLES.of(load_profile(above, {}).data) == (GymSection(dataset="gcd"),)
    other = load_profile(above, {"data.train": "reasoning_gym:lcm"})
    assert TABLES.of(other.data) == ()
    assert [reward.name for reward in other.rewards] == ["exact"]


def test_a_higher_layer_wins_key_by_key_and_replaces_lists(here: Path) -> None:
    """`extends` is a deep merge; a list is one value."""
    written(here, "steps = 5\n[learner]\nbatch_size = 3\n[learner.objective]\nclip_low = 0.1\n" + MINIMAL, "base.toml")
    child = 'extends = "base"\n[learner]\nbatch_size = 4\n[[rewards]]\nname = "format"\ncorrect = true\n'
    profile = load_profile(written(here, child), {"learner.objective.clip_low": 0.3})
    assert (profile.steps, profile.learner.batch_size) == (5, 4)
    assert profile.learner.objective == Grpo(clip_low=0.3)
    assert [reward.name for reward in profile.rewards] == ["format"]


def test_naming_a_scale_or_a_dataset_takes_back_what_lower_layers_said_of_its_twin(here: Path) -> None:
    """alpha over scale, and a training file over a held-out file that does not belong to it."""
    profile = load_profile("local-m3", {"policy.method.alpha": 32.0, "data.train": "my.jsonl"})
    assert profile.policy.method == Lora(rank=16, alpha=32.0)
    assert profile.data.heldout == ""
    assert load_profile("local-m3", {"policy.method.scale": None}).policy.method == Lora(rank=16)
    written(here, MINIMAL + '[policy.method]\nalpha = 8.0\nscaling = "rank_stabilized"\n')
    assert load_profile("./x.toml", {"policy.method.scale": 2.0}).policy.method == Lora(scale=2.0)


def test_a_layer_that_changes_a_type_keeps_the_settings_with_the_same_default(here: Path) -> None:
    """A setting passes to the new type if both types have it with the same default; other settings are dropped."""
    text = MINIMAL + (
        '[learner.schedule]\ntype = "cosine"\nwarmup_steps = 7\nmin_learning_rate = 1e-7\n'
        "[policy.method]\nrank = 4\ndropout = 0.1\n"
        '[learner.kl_penalty]\ntype = "loss"\ncoef = 0.2\nimportance_weighted = true\nreference = "average"\n'
        '[learner.objective.importance_correction]\ntype = "truncate"\nlow = 0.1\nhigh = 3.0\n'
        '[learner.objective]\nratio_reference = "batch_start"\nclip_low = 0.1\n[learner]\nnum_minibatches = 2\n'
    )
    path = written(here, text)
    profile = load_profile(
        path, {"learner.schedule": "constant", "policy.method": "dora", "learner.kl_penalty": "reward"}
    )
    assert profile.learner.schedule == ConstantSchedule(warmup_steps=7)
    assert profile.policy.method == Dora(rank=4, dropout=0.1)
    assert profile.learner.kl_penalty == RewardKLPenalty(coef=0.2, reference=AverageReference())
    correction = {"learner.objective.importance_correction": "reject_sequence"}
    objective = load_profile(path, correction).learner.objective
    assert objective == Grpo(
        ratio_reference="batch_start", clip_low=0.1, importance_correction=RejectSequenceCorrection(low=0.1, high=3.0)
    )
    masked = load_profile(path, {"learner.objective.importance_correction": "mask"}).learner.objective
    assert isinstance(masked, Grpo)
    assert masked.importance_correction == MaskCorrection()


def test_no_setting_of_an_objective_passes_to_another_objective(here: Path) -> None:
    """An objective is the recipe of one paper. A learning rate belongs to its optimizer."""
    text = '[learner.objective]\nclip_low = 0.1\nadvantage = "mean"\nmask_truncated = true\n'
    text += "[learner.optimizer]\nbeta1 = 0.5\nlearning_rate = 1e-3\nweight_decay = 0.1\n"
    path = written(here, MINIMAL + text)
    same = load_profile(path, {"learner.objective": "grpo", "learner.optimizer.beta2": 0.9}).learner
    assert same.objective == Grpo(clip_low=0.1, advantage=MeanAdvantage(), mask_truncated=True)
    assert same.optimizer == AdamW(beta1=0.5, beta2=0.9, learning_rate=1e-3, weight_decay=0.1)
    other = load_profile(path, {"learner.objective": "dr_grpo", "learner.optimizer": "lion"}).learner
    assert (other.objective, other.optimizer) == (DrGrpo(), Lion(learning_rate=1e-5, beta1=0.5, weight_decay=0.1))


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 1e-4),
        ({"policy.method": "dora"}, 1e-4),
        ({"policy.method": "full"}, 1e-6),
        ({"policy.method": "full", "learner.optimizer": "lion"}, 1e-7),
        ({"policy.method": "full", "learner.optimizer.learning_rate": 1e-3}, 1e-3),
    ],
)
def test_a_learning_rate_that_is_not_given_follows_from_method_and_optimizer(
    settings: dict[str, Any], rate: float, here: Path
) -> None:
    """The run records it."""
    assert load_profile(written(here, MINIMAL), settings).learner.optimizer.learning_rate == rate


@pytest.mark.parametrize(
    ("stated", "scale"),
    [("", 10.0), ("alpha = 64.0\n", 4.0), ("scale = 3.0\n", 3.0)],
    ids=["neither", "alpha", "scale"],
)
def test_a_run_of_an_earlier_version_keeps_the_scale_of_its_adapter(stated: str, scale: float, here: Path) -> None:
    """0.2.0 recorded every key that has a value, and neither scale nor alpha had one by default."""
    text = resolved_toml(load_profile(written(here, MINIMAL))).replace("alpha = 32.0\n", stated)
    method = load_profile(written(here, text)).policy.method
    assert isinstance(method, Lora)
    assert method.effective_scale == scale


def test_one_word_chooses_a_type(here: Path) -> None:
    """In a file and as an override; `module:function` is a custom objective."""
    path = written(here, MINIMAL + '[learner]\noptimizer = "muon"\nobjective = "a.b:c"\n')
    learner = load_profile(path).learner
    assert (learner.optimizer, learner.objective) == (Muon(learning_rate=1e-4), Custom(function="a.b:c"))
    assert load_profile(path, {"learner.objective.type": "d:e"}).learner.objective == Custom(function="d:e")


def test_a_type_keeps_the_defaults_of_the_objective_that_implies_it(here: Path) -> None:
    """ppo_decoupled masks without a lower bound; another objective's mask has its own."""
    objective = load_profile(
        written(here, MINIMAL),
        {"learner.objective": "ppo_decoupled", "learner.objective.importance_correction.high": 4.0},
    ).learner.objective
    assert objective == PpoDecoupled(importance_correction=MaskCorrection(low=0.0, high=4.0))


SWITCHES: list[dict[str, Any]] = [
    {"async": False},
    {"policy.method": "full"},
    {"learner.schedule": "constant"},
    {"eval": "off"},
    {"server": "off"},
    {"checkpoint.interval": 0},
    {"parity": "off"},
    {"steps": 1},
    {"learner.optimizer.learning_rate": 1e-9},
    {"learner.objective.ratio_reference": "batch_start", "learner.objective.importance_correction": "truncate"},
    {"learner.optimizer": "sgd"},
    {"learner.objective.advantage": "leave_one_out"},
    {"collapse_detection": "off"},
    {"atropos": "off"},
]
SWITCHED = [
    (path, switch)
    for number, switch in enumerate(SWITCHES)
    for path in sorted({PROFILES / "atropos.toml", SHIPPED[number % len(SHIPPED)]})
]
"""Every switch with a profile for groups of environments, and with another one."""


@pytest.mark.parametrize(
    ("path", "overrides"), SWITCHED, ids=lambda value: value.stem if isinstance(value, Path) else str(value)
)
def test_every_switch_works_on_top_of_the_shipped_profiles(path: Path, overrides: dict[str, Any], here: Path) -> None:
    """What a higher layer deprives of its effect falls back to its default, and still returns from TOML unchanged.

    Not so what would have groups come from elsewhere: environments are never given up without a word.
    """
    if overrides in ({"async": False}, {"server": "off"}) and path.stem.startswith("atropos"):
        with pytest.raises(ProfileError, match=f"^command line: {next(iter(overrides))} = "):
            load_profile(path.stem, overrides)
        return
    profile = load_profile(path.stem, overrides)
    assert load_profile(written(here, resolved_toml(profile))) == profile
    assert load_profile(written(here, changed_toml(profile))) == profile


def test_settings_that_lose_their_effect_fall_back_to_defaults(here: Path) -> None:
    """So that two profiles of equal effect are equal."""
    text = "[rollouts]\nmax_batches_ahead = 4\n" + MINIMAL
    assert load_profile(written(here, text)).rollouts.max_batches_ahead == 4
    assert load_profile(written(here, text), {"async": False}).rollouts.max_batches_ahead == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[learner]\nlearnin_rate = 1\n",
            "unknown key learner.learnin_rate; did you mean learner.optimizer.learning_rate?",
        ),
        ("[learner]\ntop_k = 1\n", "unknown key learner.top_k; use sampling.top_k (top_k in TRL); 0 disables it"),
        ("[policy]\nlora_rank = 4\n",
         "unknown key policy.lora_rank; use policy.method.rank (lora_rank in train_async_grpo.py, mlx_parallm)"),
        ("[samplng]\n", "unknown key or section samplng; did you mean sampling?"),
        ("[eval]\nzzzz = 1\n", "unknown key eval.zzzz; there are: eval.interval, "
         "eval.problems, eval.problems_between, eval.samples, eval.type (off, heldout)"),
        ("learner = 3\n", "learner must be a section: [learner], then one key per line"),
        ("steps = 0\n", "steps must be an integer >= 1, not 0"),
        ("[learner.optimizer]\nbeta1 = 1\n", "learner.optimizer.beta1 must be a number >= 0 and < 1, not 1"),
        ("[learner.optimizer]\nlearning_rate = inf\n", "learner.optimizer.learning_rate must be finite, not Infinity"),
        ("[learner.optimizer]\nlearning_rate = nan\n", "learner.optimizer.learning_rate must be finite, not NaN"),
        ('[engine]\nkv_policy = "kep"\n', 'engine.kv_policy must be one of drain, keep, recompute, not "kep"'),
        ("[sampling]\nstop = [1]\n", "sampling.stop[0] must be text, not empty, not 1"),
        (
            '[sampling]\nlogit_bias = [[1, "a"]]\n',
            "sampling.logit_bias[0] must be [an integer >= 0, a number >= -100 and <= 100], "
            'not [1, "a"]',
        ),
        ('[[rewards]]\nname = "format"\nwieght = 2\n', "unknown key rewards.wieght; did you mean rewards.weight?"),
        ("[[rewards]]\nweight = 1\n", "rewards[1].name is missing"),
        ("extends = 3\n", "extends must be a profile's name or path, not 3"),
        ('extends = "x.toml"\n', "extends itself: x.toml -> x.toml"),
        ('extends = "nowhere.toml"\n', "nowhere.toml: there is no such file"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_on_one_line(text: str, message: str, here: Path) -> None:
    """File, key, what is allowed, what was found, and the nearest valid key."""
    head = text if not text.startswith("[") else ""
    tail = text if text.startswith("[") else ""
    with pytest.raises(ProfileError) as caught:
        load_profile(written(here, head + MINIMAL + tail))
    assert str(caught.value).removeprefix("x.toml: ") == message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\npath = \n", "is not valid TOML: Invalid value (at line 2, column 8)"),
        ("", "model.path is missing: Model directory, GGUF file, package:NAME/FILE or hub repository."),
        ('[model]\npath = "x"\n', "data.train is missing: Dataset: file, directory, OWNER/NAME on the hub, "
         "reasoning_gym:NAME."),
        ('[model]\npath = "x"\n[data]\ntrain = "y"\n', "rewards are missing: list at least one in [[rewards]]; "
         "only demonstrations and pairs of a dataset need none"),
        ('rewards = 3\n', "rewards must be a list of tables: [[rewards]], then one key per line"),
    ],
)  # fmt: skip
def test_an_unusable_file_is_named_on_one_line(text: str, message: str, here: Path) -> None:
    """Syntax errors come with their line; what is missing is explained."""
    with pytest.raises(ProfileError) as caught:
        load_profile(written(here, text))
    assert str(caught.value).removeprefix("x.toml: ") == message


def test_unreadable_files_are_the_persons_mistake(here: Path) -> None:
    """Neither a directory nor bytes that are no text end in a traceback."""
    (here / "d.toml").mkdir()
    (here / "b.toml").write_bytes(b"steps = 1 # \xff\n")
    (here / "bom.toml").write_text("\ufeffsteps = 3\n" + MINIMAL, encoding="utf-8")
    with pytest.raises(ProfileError, match=r"d.toml: is not a regular file"):
        load_profile("d.toml")
    with pytest.raises(ProfileError, match=r"b.toml: is not UTF-8 text \(byte 12\)"):
        load_profile("b.toml")
    assert load_profile("bom.toml").steps == 3


def test_an_unknown_profile_lists_those_there_are(here: Path) -> None:
    """With the nearest."""
    with pytest.raises(ProfileError, match=r"no profile 'local-m4': there are .*local-m3, .*; did you mean local-m3\?"):
        load_profile("local-m4")


def test_a_shipped_profile_has_names_without_a_machine(here: Path) -> None:
    """The run directory has the name that was used; a profile of the user can extend either."""
    (here / "mine.toml").write_text('extends = "times-table"\n')
    assert PROFILE_NAMES == {"quickstart": "local-m3", "times-table": "learn-m3", "qwen3-0.6b": "qwen3-m3"}
    for name, file in PROFILE_NAMES.items():
        assert load_profile(name) == replace(load_profile(file), run_dir=f"runs/{name}")
    assert load_profile("mine.toml").steps == load_profile("learn-m3").steps


def test_a_mistake_on_the_command_line_is_called_that(here: Path) -> None:
    """Not the file, which is innocent."""
    with pytest.raises(ProfileError, match=r"^command line: learner.batch_size must be an integer >= 1, not 0$"):
        load_profile("local-m3", {"learner.batch_size": 0})
    with pytest.raises(ProfileError, match=r"^command line: sampling.repetition_penalty = 1.5"):
        load_profile("local-m3", {"sampling.repetition_penalty": 1.5})


def test_extends_in_a_circle_is_refused(here: Path) -> None:
    """Layers end."""
    written(here, 'extends = "b"', "a.toml")
    written(here, 'extends = "a"', "b.toml")
    with pytest.raises(ProfileError, match=r"a.toml: extends itself: a.toml -> b.toml -> a.toml"):
        load_profile("a.toml")


@pytest.mark.parametrize(
    "settings",
    [
        {"server.api_key": "s3cret"},
        {"generator.type": "remote", "generator.server_url": ["http://host:1"], "generator.api_key": "s3cret"},
    ],
    ids=["server", "generator"],
)
def test_an_api_key_is_kept_from_other_eyes(here: Path, settings: dict[str, Any]) -> None:
    """The record is readable by its owner only; what is printed hides the key."""
    profile = load_profile("local-m3", settings)
    write_profile(profile, here / "profile.toml")
    assert stat.S_IMODE((here / "profile.toml").stat().st_mode) == 0o600
    assert load_profile("./profile.toml") == profile
    assert "s3cret" not in resolved_toml(profile, mask_secrets=True) + changed_toml(profile)
    assert [path.name for path in here.iterdir()] == ["profile.toml"]


def test_options_of_own_actors_return_from_toml(here: Path) -> None:
    """Anything that TOML can say may be handed to a factory."""
    text = MINIMAL + (
        '[[actors]]\nname = "tap"\nfactory = "a.b:C"\nmode = "tap"\nat = "scored"\n'
        '[actors.options]\nn = 3\ndeep = {list = [1, 2.5, "x"], on = true}\n'
    )
    profile = load_profile(written(here, text))
    assert profile.actors[0].options["deep"]["list"] == [1, 2.5, "x"]
    assert load_profile(written(here, resolved_toml(profile))) == profile
    assert load_profile(written(here, changed_toml(profile))) == profile


def test_a_file_of_another_trainer_needs_the_attachment_that_converts_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, YAML is refused by the name of the attachment, and not as TOML that is not valid."""
    (here / "lora.yaml").write_text("iters: 3\n", encoding="utf-8")
    assert load_profile("lora.yaml").steps == 3
    monkeypatch.setattr("training_run.profile.load.IMPORTED", Door("attachment.no_such_door"))
    with pytest.raises(ProfileError, match="'migration'"):
        load_profile("lora.yaml")
