"""The keys read from the structs, and the help texts."""

from __future__ import annotations

import pytest

from protocols.errors import ProfileError
from training_run.profile.aliases import SHORT
from training_run.profile.flags import COMMON, default_in_words, help_text
from training_run.profile.keys import CHOICES, KEYS, PROFILE_KEYS, SECTIONS, SETTABLE, flag_of
from training_run.profile.mounted import with_attachments
from training_run.profile.schema import Profile


def test_every_key_has_help_and_says_what_is_allowed() -> None:
    """A key without a description cannot be understood from --help."""
    assert [key.path for key in KEYS.values() if not key.help] == []
    table = {key.path for key in KEYS.values() if key.allowed == "a table"}
    names = {path.rpartition(".")[2] for path in table}
    assert names == {"options", "chat_template_kwargs", "type_weights", "settings", "environment"}


def test_the_schema_covers_every_field_of_every_section() -> None:
    """Flags and manual are made from it: a field that is missing here could not be set or found."""
    assert {section.name for section in SECTIONS.values()} >= {"", "model", "policy", "sampling", "rewards", "actors"}
    top = set(with_attachments(Profile).__struct_encode_fields__)
    assert top == {key.path.partition(".")[0] for key in KEYS.values()}


def test_the_key_of_a_union_has_its_types() -> None:
    """The first type of the union is the default unless the field says otherwise."""
    assert CHOICES["learner.schedule.type"] == ("constant", "linear", "cosine")
    assert KEYS["learner.schedule.type"].variants[0].default == "constant"


def test_the_help_of_everything_names_every_flag_and_stays_narrow() -> None:
    """`--help-all` shows the full schema."""
    text = help_text("all", width=80)
    arrays = {section.name for section in SECTIONS.values() if section.repeated}
    shown = [flag_of(path) for path in SETTABLE if path not in arrays and path not in SHORT.values()]
    assert [flag for flag in shown if f"  {flag}  " not in text] == []
    inner = [path.rpartition(".")[2] for section in SECTIONS.values() if section.repeated for path in section.keys]
    assert [name for name in inner if f"    {name}  " not in text] == []
    assert "required" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_short_help_shows_the_twenty_most_used_flags_on_one_screen() -> None:
    """`--help` says how to see the other flags."""
    text = help_text()
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert len(flags) == 20
    assert len(text.splitlines()) <= 46
    assert "--help-all" in text
    assert "--help SECTION" in text
    assert [path for path in COMMON if PROFILE_KEYS.named(path) is None] == []


def test_the_help_of_a_section_is_complete() -> None:
    """Every key with its allowed values, its default and its description."""
    text = " ".join(help_text("learner").split())
    for key in KEYS.values():
        if key.path.startswith("learner."):
            for part in (flag_of(key.path), key.allowed, default_in_words(key), key.help):
                assert " ".join(part.split()) in text
    assert "--sampling" not in help_text("learner")


def test_the_help_of_an_array_of_tables_shows_its_flag() -> None:
    """The flag takes all tables at once."""
    assert "--rewards '[{...}, ...]'" in help_text("rewards")


def test_help_for_one_key_is_its_row() -> None:
    """`--help steps` and `--help sampling.top-k`."""
    assert help_text("steps").startswith("  --steps  an integer >= 1  (100)")
    assert "--sampling.top-k" in help_text("sampling.top_k")


def test_help_for_a_section_that_does_not_exist_names_the_nearest() -> None:
    """`--help lerner`."""
    with pytest.raises(ProfileError, match="did you mean learner"):
        help_text("lerner")
