"""Any profile file and any command line is accepted or refused with one line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attachments.migration.other_trainers import by_name
from protocols.errors import ProfileError
from training_run.__main__ import main
from training_run.profile.aliases import SHORT
from training_run.profile.flags import COMMON, OWN, help_text, parse_arguments
from training_run.profile.keys import KEYS, SETTABLE
from training_run.profile.load import MAX_BYTES, MAX_FILES, PROFILES, load_profile, resolved_toml
from training_run.profile.schema import Profile

HOSTILE = "\x1b[2J\u202e\x00\n"
SHIPPED = (PROFILES / "local-m3.toml").read_text(encoding="utf-8")
FAST, SLOW = settings.get_profile("repeatable"), settings.get_profile("many")

scalars = st.one_of(
    st.sampled_from(["true", "1", "0", "-1", "inf", "nan", "1e400", "9" * 30, '""', '"none"', '"gspo"', "1979-05-27"]),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=8).map(repr),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.tuples(st.sampled_from(["type", "name", "weight", "low"]), inner).map(
            lambda pair: f"{{{pair[0]} = {pair[1]}}}"
        ),
    ),
    max_leaves=6,
)
paths = st.one_of(st.sampled_from([*KEYS, *SETTABLE]), st.sampled_from(sorted({p.rpartition(".")[0] for p in KEYS})))
lines = st.tuples(paths, values).map(lambda pair: f"{pair[0] or 'extends'} = {pair[1]}")
profiles = st.one_of(
    st.text(),
    st.lists(lines, max_size=4).map(lambda found: "\n".join([*found, 'extends = "local-m3"'])),
    st.tuples(st.integers(0, len(SHIPPED)), st.integers(0, 40), st.text(max_size=4)).map(
        lambda edit: SHIPPED[: edit[0]] + edit[2] + SHIPPED[edit[0] + edit[1] :]
    ),
)
flags = st.one_of(
    st.sampled_from(sorted({*SETTABLE, *OWN, *SHORT, *COMMON, *by_name()})).map(lambda name: f"--{name}"),
    st.text(max_size=8).map(lambda name: f"--{name}"),
)
words = st.one_of(flags, values, st.text(max_size=8), st.tuples(flags, values).map("=".join))
command_lines = st.lists(words, max_size=5)


def refusal(action: Callable[[], Profile | str]) -> ProfileError | None:
    """The error of an action; None if it succeeds. A profile that loads can be written."""
    try:
        result = action()
    except ProfileError as error:
        return error
    assert resolved_toml(result) if isinstance(result, Profile) else result
    return None


def check(action: Callable[[], Profile | str]) -> None:
    """An action succeeds, or the user reads one line of bounded length."""
    error = refusal(action)
    assert error is None or (error.exit_status == 2 and len(str(error)) < 3000)


def check_file(text: str) -> None:
    """Load a text as a profile file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "any.toml"
        path.write_text(text, encoding="utf-8")
        check(lambda: load_profile(str(path)))


def check_command_line(argv: list[str]) -> None:
    """Parse a command line, and load the profile or the help text that it names."""

    def action() -> Profile | str:
        arguments = parse_arguments(argv)
        if arguments.help is not None:
            return help_text(arguments.help)
        return load_profile("local-m3", arguments.overrides)

    check(action)


@FAST
@given(profiles)
def test_any_text_is_a_profile_or_refused(text: str) -> None:
    """Random text, random settings, and the shipped profile with random edits."""
    check_file(text)


@FAST
@given(command_lines)
def test_any_command_line_is_parsed_or_refused(argv: list[str]) -> None:
    """Known flags, unknown flags, names of other trainers and random words."""
    check_command_line(argv)


@pytest.mark.slow
@SLOW
@given(profiles)
def test_any_of_many_texts_is_a_profile_or_refused(text: str) -> None:
    """Like the fast test, with a hundred times as many examples."""
    check_file(text)


@pytest.mark.slow
@SLOW
@given(command_lines)
def test_any_of_many_command_lines_is_parsed_or_refused(argv: list[str]) -> None:
    """Like the fast test, with a hundred times as many examples."""
    check_command_line(argv)


DEEP = 3000
MINIMAL = 'model.path = "b"\ndata.train = "t"\nrewards = [{name = "exact", correct = true}]\n'
ACTOR = '[[actors]]\nname = "a"\nfactory = "a.b:C"\nmode = "tap"\nat = "scored"\n'
FILES = {
    "digits": "steps = " + "9" * 5000,
    "large_integer": MINIMAL + f"steps = {10**23}",
    "lists": "steps = " + "[" * DEEP,
    "closed_lists": f"steps = {'[' * DEEP}{']' * DEEP}",
    "tables": "steps = " + "{a = " * DEEP,
    "dotted": f"{'a.' * DEEP}a = 1",
    "options": MINIMAL + ACTOR + f"options.{'a.' * DEEP}a = 1",
    "options_of_100_levels": MINIMAL + ACTOR + f"options.{'a.' * 100}a = 1",
    "extends_nul": 'extends = "./a\\u0000b.toml"',
    "extends_name_nul": 'extends = "a\\u0000b"',
    "extends_long": f'extends = "{"a" * 5000}"',
    "extends_long_path": f'extends = "./{"a" * 5000}.toml"',
    "extends_no_user": 'extends = "~nobody-here/a.toml"',
    "extends_directory": 'extends = "./"',
    "key": f'"{"x" * 500_000}" = 1',
    "control_key": '"\\u001b[2J\\u202e" = 1',
    "control_section": '["\\u0000"]\na = 1',
    "control_value": MINIMAL + 'run_dir = "a\\u0000b"',
    "large_value": MINIMAL + f'[engine]\nkv_policy = "{"x" * 500_000}"',
    "large_file": "#" * (MAX_BYTES + 1),
    "inf": MINIMAL + "[learner.optimizer]\nlearning_rate = inf",
    "type_of_list": MINIMAL + "[learner.objective]\ntype = [1]",
    "union_of_list": MINIMAL + "[learner]\nobjective = [1]",
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_hostile_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """Deep nesting, large numbers, unusable paths, control characters and long names."""
    (tmp_path / "p.toml").write_text(FILES[name], encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        load_profile(str(tmp_path / "p.toml"))
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "profile", ["/dev/zero", "/dev/null", "fifo.toml", "./", "a\0b", "a\0b.toml", "x" * 5000, "/" * 9]
)
def test_a_profile_is_a_regular_file(profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices, pipes and directories are refused without being read."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.toml")
    with pytest.raises(ProfileError):
        load_profile(profile)


def test_few_profiles_extend_each_other(tmp_path: Path) -> None:
    """A chain longer than the limit is refused, a chain of that length is read."""
    for number in range(MAX_FILES + 1):
        (tmp_path / f"p{number}.toml").write_text(f'extends = "p{number + 1}"\n', encoding="utf-8")
    (tmp_path / f"p{MAX_FILES}.toml").write_text('extends = "local-m3"\nsteps = 7\n', encoding="utf-8")
    assert load_profile(str(tmp_path / "p2.toml")).steps == 7
    with pytest.raises(ProfileError, match=f"more than {MAX_FILES} profiles"):
        load_profile(str(tmp_path / "p0.toml"))


@pytest.mark.parametrize(
    "argv",
    [
        [f"--{HOSTILE}", "1"],
        ["--" + "x" * 500_000],
        ["x" * 500_000],
        ["--rewards", "[" * 5000],
        ["--rewards", "[" * 5000 + "]" * 5000],
        ["--sampling.stop", "[" * 5000],
        ["--steps", "9" * 5000],
        ["--steps", str(10**23)],
        ["--engine.kv-policy", HOSTILE],
        ["--engine.kv-policy", "x" * 500_000],
        ["--help", "x" * 500_000],
        ["--profile", f"{HOSTILE}.toml"],
        ["--profile", "x" * 5000],
        ["--run-dir", "a\0b"],
        ["--run-dir", "~nobody-here/run"],
        ["--run-dir", "x" * 5000],
        ["--model", "/" + "a" * 5000],
        ["--model", "a\0b"],
        ["--dataset", "x" * 5000],
        ["--dataset", "€" * 100],
        ["--dataset", "\udcff"],
        ["--checkpoint.adapter-path", "x" * 5000],
        ["--checkpoint.adapter-path", "~nobody-here/a"],
    ],
    ids=lambda argv: "_".join(word[:24].encode("unicode_escape").decode() for word in argv),
)
def test_a_hostile_command_line_ends_with_one_line_and_status_2(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    assert main(["--server.port", "0", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) < 2000
    assert error.removesuffix("\n").isprintable()
    assert list(tmp_path.iterdir()) == []
