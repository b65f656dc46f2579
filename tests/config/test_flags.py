"""The command line: every key is a flag, earlier trainers' names mean the same, and nothing is guessed."""

from __future__ import annotations

from typing import Any

import pytest

from clotho.config.flag_aliases import ALIASES, CONSTANTS, ELSEWHERE
from clotho.config.flags import Arguments, parse_arguments
from clotho.config.keys import REQUIRED, Key, settable
from clotho.config.load import load_profile
from protocols.errors import ProfileError

OF_A_FORM = {"policy.ranks": "mlp.up_proj=4", "learner.objective": "gspo", "atropos.url": "http://a:1"}


def example(key: Key) -> str:
    """Some text that the key's flag takes."""
    if key.path in OF_A_FORM:
        return OF_A_FORM[key.path]
    if key.item == "tables":
        return "[]"
    if key.item == "list":
        return "[[1, 2.0]]"
    if key.allowed.startswith("one of "):
        return key.allowed.removeprefix("one of ").split(", ")[-1]
    if key.allowed in ("a number >= 1", "a number >= 1.0", "a number > 1"):
        return "1.5"
    by_kind = {"bool": "false", "int": "3", "float": "0.5", "text": "some text"}
    return by_kind[(key.item or "text") if key.kind == "list" else key.kind]


@pytest.mark.parametrize("path", sorted(settable()))
def test_every_key_is_a_flag(path: str) -> None:
    """With dashes or underscores, with a space or `=`; read as the key's own type."""
    key = settable()[path]
    text = example(key)
    dashed = parse_arguments([f"--{path.replace('_', '-')}", text]).overrides
    assert dashed.keys() == {path}
    assert parse_arguments([f"--{path}={text}"]).overrides == dashed
    if key.default not in (REQUIRED, None) and not isinstance(key.default, tuple):
        assert type(dashed[path]) is type(key.default)


ALIAS_EXAMPLES = {"kl-estimator": ("mse", "k2"), "model": ("a/b", "a/b"), "host": ("::1", "::1")}


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.name)
def test_every_alias_sets_its_keys(alias: Any) -> None:
    """The names of earlier trainers are accepted where they mean the same, with `_` too."""
    text = ALIAS_EXAMPLES[alias.name][0] if alias.name in ALIAS_EXAMPLES else example(settable()[alias.keys[0]])
    overrides = parse_arguments([f"--{alias.name}", text]).overrides
    assert overrides.keys() == set(alias.keys)
    assert parse_arguments([f"--{alias.name.replace('-', '_')}={text}"]).overrides == overrides
    if alias.name in ALIAS_EXAMPLES:
        assert overrides[alias.keys[0]] == ALIAS_EXAMPLES[alias.name][1]


def test_switches_of_earlier_trainers_mean_fixed_values() -> None:
    """--disable-async and --save-every-step."""
    assert parse_arguments(["--disable-async"]).overrides == {"async": False}
    assert parse_arguments(["--disable-async", "false"]).overrides == {"async": True}
    assert parse_arguments(["--save-every-step", "true"]).overrides == {"checkpoint.interval": 1}
    assert {constant.name for constant in CONSTANTS} == {"disable-async", "save-every-step"}


def test_a_whole_command_line_of_an_earlier_trainer_is_understood() -> None:
    """And the profile that comes of it is valid."""
    line = (
        "--model-path ./m --dataset-path d.json --adapter-path ./adapters --batch-size 4 --group-size 4 "
        "--num-iters 1000 --learning-rate 1e-5 --lora-rank 16 --lora-scale 10.0 --num-batches-ahead 3 "
        "--clip-ratio 0.2 --kl-beta 0.05 "
        "--kl-estimator k3 --entropy-weight 0.0 --max-tokens 256 --checkpoint-interval 50 --token-budget 16384"
    )
    profile = load_profile("local-m3", parse_arguments(line.split()).overrides)
    assert (profile.learner.batch_size, profile.sampling.group_size, profile.steps) == (4, 4, 1000)
    assert (profile.learner.clip_low, profile.learner.clip_high) == (0.2, 0.2)
    assert profile.data.heldout == ""
    assert profile.checkpoint.adapter_path == "./adapters"


def test_an_average_that_keeps_all_of_itself_is_none() -> None:
    """`--ref-ema` chooses the moving average that it speaks of; 1.0 is how it was switched off."""
    average = load_profile("local-m3", parse_arguments(["--kl-beta", "0.1", "--ref-ema", "0.99"]).overrides).learner
    assert (average.reference, average.ref_ema) == ("average", 0.99)
    base = load_profile("local-m3", parse_arguments(["--kl-beta", "0.1", "--ref-ema", "1.0"]).overrides).learner
    assert base.reference == "base"


def test_the_top_flags_are_read() -> None:
    """What a run does, beside what a profile says."""
    line = "--profile qwen3-m3 --steps 3 --seed 7 --run-dir r --resume --model a/b --dataset f.jsonl --async false"
    assert parse_arguments([*line.split(), "--dry-run"]) == Arguments(
        profile="qwen3-m3",
        resume=True,
        dry_run=True,
        overrides={
            "steps": 3, "seed": 7, "run_dir": "r", "model.path": "a/b", "data.train": "f.jsonl", "async": False,
        },
    )  # fmt: skip
    assert parse_arguments(["--clean"]).clean
    assert parse_arguments(["--nonsense", "--help"]).help
    assert parse_arguments([]) == Arguments(profile="local-m3")


def test_lists_are_repeated_or_written_as_toml_or_json() -> None:
    """Arrays of tables in the one form that is short enough for a shell."""
    expected = {"sampling.stop": ["a,b", "c"]}
    assert parse_arguments(["--sampling.stop", "a,b", "--sampling.stop", "c"]).overrides == expected
    assert parse_arguments(["--sampling.stop", '["a,b", "c"]']).overrides == expected
    assert parse_arguments(["--sampling.stop=['a,b']", "--sampling.stop=c"]).overrides == expected
    assert parse_arguments(["--sampling.stop-token-ids", "[1, 2]"]).overrides == {"sampling.stop_token_ids": [1, 2]}
    toml = parse_arguments(["--rewards", '[{name="format", weight=0.2}]']).overrides
    assert toml == parse_arguments(["--rewards", '[{"name": "format", "weight": 0.2}]']).overrides
    assert toml == parse_arguments(["--rewards", '{name="format", weight=0.2}']).overrides
    assert toml == {"rewards": [{"name": "format", "weight": 0.2}]}


def test_booleans_may_stand_alone_and_optional_keys_may_be_taken_back() -> None:
    """--monitor.rollouts is true; --policy.scale none is as if it had never been given."""
    assert parse_arguments(["--monitor.rollouts", "--steps", "2"]).overrides == {"monitor.rollouts": True, "steps": 2}
    assert parse_arguments(["--eval.enabled", "false"]).overrides == {"eval.enabled": False}
    assert parse_arguments(["--policy.scale", "none"]).overrides == {"policy.scale": None}


def test_the_same_value_may_be_given_twice() -> None:
    """Scripts append flags."""
    assert parse_arguments(["--lr", "1e-5", "--learner.learning-rate", "0.00001"]).overrides == {
        "learner.learning_rate": 1e-5
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--learner.learnin-rate 1", "unknown flag --learner.learnin-rate; did you mean --learner.learning-rate?"),
        ("--group_sze=1", "unknown flag --group_sze; did you mean --group-size?"),
        ("--problems-between 3", "unknown flag --problems-between; did you mean --eval.problems-between?"),
        ("--resum", "unknown flag --resum; did you mean --resume?"),
        ("--rewards.weight 2", "unknown flag --rewards.weight; did you mean --rewards?"),
        ("--qqqqqqqq", "unknown flag --qqqqqqqq; see --help"),
        ("--reward_content_type jaccard", "unknown flag --reward_content_type: rewards and their weights are listed: "
         """--rewards '[{name = "format", weight = 0.2}, ...]'"""),
        ("--ref-ema 1.5", "--ref-ema must be a number > 0 and < 1, not 1.5"),
        ("--config x.toml", "unknown flag --config: a configuration file is given with --profile"),
        ("train.jsonl", "unexpected argument 'train.jsonl': every setting is a flag, see --help"),
        ("--steps", "--steps needs a value"),
        ("--steps --seed 1", "--steps needs a value"),
        ("--steps ten", '--steps must be an integer >= 1, not "ten"'),
        ("--steps 1.5", '--steps must be an integer >= 1, not "1.5"'),
        ("--steps 0", "--steps must be an integer >= 1, not 0"),
        ("--lr -1", "--lr must be a number > 0, not -1.0"),
        ("--lr inf", "--lr must be a number > 0, and finite, not Infinity"),
        ("--kl-estimator k9", '--kl-estimator must be one of k1, k2, k3, abs, not "k9"'),
        ("--async maybe", "--async must be true or false, not 'maybe'"),
        ("--resume runs/x", "--resume must be true or false, not 'runs/x'"),
        ("--resume --clean", "--resume continues a run and --clean deletes it: give one of the two"),
        ("--save-every-step false", "--save-every-step false says nothing: use --checkpoint.interval"),
        ("--steps 3 --num-iters 4", "--steps and --num-iters contradict each other: 3 and 4"),
        ("--steps 3 --steps 4", "--steps is given twice: 3 and 4"),
        ("--clip-ratio 0.2 --learner.clip-high 0.3", "--clip-ratio and --learner.clip-high contradict each other: "
         "0.2 and 0.3"),
        ("--disable-async --async true", "--disable-async and --async contradict each other: false and true"),
        ("--profile a --profile b", '--profile is given twice: "a" and "b"'),
        ("--sampling.stop-token-ids [1,", '--sampling.stop-token-ids must be a list, each an integer >= 0, written as TOML '
         'or JSON, not "[1,"'),
        ("--actors [null]", '--actors must be a list, each a table, written as TOML or JSON, not "[null]"'),
        ("--rewards format", '--rewards must be a list, each a table, at least 1, written as TOML or '
         'JSON, not "format"'),
    ],
)  # fmt: skip
def test_a_mistake_is_named_on_one_line(line: str, message: str) -> None:
    """With the flag as it was written, what it takes, and the nearest valid one."""
    with pytest.raises(ProfileError) as caught:
        parse_arguments(line.split())
    assert str(caught.value) == message


def test_tables_given_by_flag_are_checked_with_the_profile() -> None:
    """A misspelt key inside is the command line's mistake."""
    overrides = parse_arguments(["--rewards", '[{name="format", wieght=2}]']).overrides
    with pytest.raises(ProfileError, match=r"^command line: unknown key rewards.wieght; did you mean rewards.we"):
        load_profile("local-m3", overrides)


def test_what_was_left_behind_is_no_flag() -> None:
    """A name is either taken over or explained, never both."""
    taken = {alias.name for alias in ALIASES} | {constant.name for constant in CONSTANTS}
    assert taken.isdisjoint(ELSEWHERE)
    assert {name.replace("-", "_") for name in taken}.isdisjoint(settable())
