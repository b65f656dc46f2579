"""Settings of attachments: mounted where their folder is, and refused by name where it is not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Struct

from clotho.settings.bounds import Off, Variant, about
from clotho.settings.keys import Keys, decode_table, flatten_table
from clotho.settings.mounted import Setting
from protocols.errors import ProfileError
from training_run.profile import mounted
from training_run.profile.flags import help_text, parse_arguments
from training_run.profile.keys import KEYS, PROFILE_KEYS, SECTIONS
from training_run.profile.load import (
    Layer,
    file_layers,
    load_profile,
    merge_layers,
    profile_path,
    resolved_toml,
    write_profile,
)
from training_run.profile.mounted import ATTACHED, SETTINGS, absent_keys, mount
from training_run.profile.rules import CONTRADICTIONS, NO_EFFECT
from training_run.profile.schema import Profile


class Served(Variant, frozen=True, kw_only=True, tag="served"):
    """A server."""

    port: int = 1
    host: str = "here"


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an attachment adds."""

    most: Annotated[int, about("The most.", ge=1)] = 3


class Root(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile with a union."""

    server: Off | Served = Served(port=2)
    steps: int = 1


LIMITS = Setting[Limits](path="server.limits", kind=Limits, default=Limits(), attachment="limits", after="port")
SPEED = Setting[Off | Served](path="speed", kind=Off | Served, default=Off(), attachment="speed")


def decoded(table: dict[str, Any], *settings: Setting[Any], absent: dict[str, str] | None = None) -> Root:
    """Decode a table to `Root` with these settings."""
    kind = mount(Root, settings)
    keys = Keys(kind, mounted=settings, absent=absent or {})
    merged = merge_layers(keys, [Layer("file", flatten_table(keys, table, "file"))])
    return decode_table(keys, merged.values, kind, merged.label)


def test_a_mounted_setting_is_decoded_and_written_like_any_other() -> None:
    """Structs with mounted settings are instances of those without."""
    found = decoded({"server": {"limits": {"most": 5}}, "speed": "served"}, LIMITS, SPEED)
    assert isinstance(found, Root)
    assert isinstance(found.server, Served)
    assert LIMITS.of(found.server) == Limits(most=5)
    assert SPEED.of(found) == Served()
    assert decoded(msgspec.to_builtins(found), LIMITS, SPEED) == found


def test_a_mounted_setting_has_its_default_where_it_is_not_given() -> None:
    """Also in a struct that lacks the key, and in another type of the union."""
    assert LIMITS.of(decoded({}, LIMITS).server) == Limits()
    assert decoded({}, LIMITS).server == decoded({"server": {"port": 2}}, LIMITS).server
    assert LIMITS.of(decoded({"server": "off"}, LIMITS).server) == Limits()
    assert LIMITS.of(Root().server) == Limits()


def test_a_mounted_setting_can_be_put_into_any_struct_of_its_table() -> None:
    """With the key or without it."""
    for server in (Served(port=7), decoded({"server": {"port": 7}}, LIMITS).server):
        changed = LIMITS.put(server, Limits(most=9))
        assert LIMITS.of(changed) == Limits(most=9)
        assert isinstance(changed, Served)
        assert changed.port == 7


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"server": {"limits": {"most": 0}}}, "server.limits.most"),
        ({"server": {"limits": {"least": 1}}}, "server.limits.least"),
        ({"server": {"type": "off", "limits": {"most": 1}}}, "server.limits.most"),
        ({"speed": {"type": "off", "port": 3}}, "speed.port"),
    ],
)
def test_a_mounted_setting_is_checked_like_any_other(table: dict[str, Any], key: str) -> None:
    """Bounds, unknown keys, and types of a union that lack it."""
    with pytest.raises(ProfileError, match=key):
        decoded(table, LIMITS, SPEED)


@pytest.mark.parametrize("table", [{"server": {"limits": {"most": 1}}}, {"speed": "served"}, {"speed": {"port": 1}}])
def test_a_key_of_an_absent_attachment_is_refused_by_its_name(table: dict[str, Any]) -> None:
    """Whatever its value is."""
    with pytest.raises(
        ProfileError, match=r"belongs to the attachment '(limits|speed)', which this installation lacks"
    ):
        decoded(table, absent={"server.limits": "limits", "speed": "speed"})


def test_lists_show_a_mounted_setting_in_its_place() -> None:
    """After the key that it names, or last."""
    keys = Keys(mount(Root, [LIMITS, SPEED]), mounted=[LIMITS, SPEED])
    assert [*keys.sections] == ["", "server", "server.limits", "speed"]
    assert [*keys.sections["server"].keys] == ["server.type", "server.port", "server.host"]
    port = Setting[int](path="server.door", kind=int, default=0, attachment="doors", after="port")
    doors = Keys(mount(Root, [port]), mounted=[port])
    assert [*doors.sections["server"].keys] == ["server.type", "server.port", "server.door", "server.host"]
    assert keys.all["server.limits.most"].attachment == "limits"
    assert keys.all["server.port"].attachment == ""


def test_the_table_names_the_attachment_of_every_setting() -> None:
    """It is equal to what the folders declare."""
    assert {setting.path: setting.attachment for setting in SETTINGS} == ATTACHED


def test_a_setting_belongs_to_the_folder_that_declares_it() -> None:
    """So that the refusal names a folder that exists."""
    for setting in SETTINGS:
        module = __import__(f"attachments.{setting.attachment}.sections", fromlist=["SETTINGS"])
        assert setting in module.SETTINGS


NAMES = sorted(set(ATTACHED.values()))


@pytest.mark.parametrize("missing", [NAMES, NAMES[::2], NAMES[1::2]], ids=["all", "half", "other half"])
def test_a_profile_without_keys_of_absent_attachments_loads(missing: list[str]) -> None:
    """All other settings are those of the whole installation."""
    there = [setting for setting in SETTINGS if setting.attachment not in missing]
    absent = {setting.path: setting.attachment for setting in SETTINGS if setting.attachment in missing}
    kind = mount(Profile, there)
    keys = Keys(kind, mounted=there, absent=absent)
    layers = file_layers(profile_path("local-m3"))
    merged = merge_layers(keys, layers)
    found = msgspec.to_builtins(decode_table(keys, merged.values, kind, merged.label))
    whole = msgspec.to_builtins(load_profile("local-m3"))
    for setting in SETTINGS:
        *tables, name = setting.path.split(".")
        if setting.attachment in missing:
            parent = whole
            for table in tables:
                parent = parent[table]
            parent.pop(name)
    assert {**found, "run_dir": ""} == {**whole, "run_dir": ""}
    for key, attachment in absent.items():
        with pytest.raises(ProfileError, match=f"attachment '{attachment}'"):
            keys.require_known(key, "file")


def test_rules_of_the_core_refuse_keys_of_the_core_only() -> None:
    """They may read keys of attachments, and hold without them."""
    keys = Keys(Profile)
    merged = merge_layers(keys, file_layers(profile_path("local-m3")))
    profile = decode_table(keys, merged.values, Profile, merged.label)
    values = flatten_table(keys, msgspec.to_builtins(profile), "file")
    values |= {"rewards": profile.rewards, "actors": profile.actors}
    chosen = keys.chosen_types(values)
    for rule in (*NO_EFFECT, *CONTRADICTIONS):
        for key in rule.keys.split():
            if keys.settable[key].variant(chosen):
                rule.refused(values, values[key])


def test_the_help_names_the_attachment_of_a_setting() -> None:
    """At the table, if the whole table is of the attachment, and otherwise at the key."""
    assert "Attachment: trackers." in help_text("trackers")
    assert SECTIONS["trackers"].attachment == KEYS["trackers"].attachment == "trackers"


def test_a_flag_of_an_absent_attachment_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its key in a file is."""
    monkeypatch.setattr(PROFILE_KEYS, "_absent", {"telescope": "astronomy"})
    with pytest.raises(ProfileError, match="attachment 'astronomy'"):
        parse_arguments(["--telescope.lens", "3"])
    with pytest.raises(ProfileError, match="attachment 'astronomy'"):
        help_text("telescope")


def test_the_file_of_a_profile_leaves_out_what_attachments_add_by_default(tmp_path: Path) -> None:
    """An installation without an attachment that a run did not use can resume it."""
    profile = load_profile("local-m3", {"replay.type": "buffer"})
    write_profile(profile, tmp_path / "profile.toml")
    written = flatten_table(PROFILE_KEYS, tomllib.loads((tmp_path / "profile.toml").read_text("utf-8")), "file")
    assert {KEYS[path].attachment for path in written if KEYS[path].attachment} == {"replay"}
    assert load_profile(str(tmp_path / "profile.toml")) == profile


def test_the_resolved_profile_has_mounted_settings() -> None:
    """It is what a resumed run reads."""
    found = load_profile("local-m3", {"trackers": [{"name": "wandb", "mode": "offline"}]})
    assert tomllib.loads(resolved_toml(found))["trackers"] == [{"name": "wandb", "mode": "offline", "completions": 8}]


def test_the_keys_of_an_attachment_are_absent_without_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of the attachment, which a message gives. With all folders, no key is absent."""
    assert absent_keys() == {}
    replay = {key: name for key, name in ATTACHED.items() if name == "replay"}
    assert replay
    monkeypatch.setattr(mounted, "SETTINGS", [setting for setting in SETTINGS if setting.path not in replay])
    assert absent_keys() == replay
