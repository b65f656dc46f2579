"""The file of API keys is read completely or refused with one line that contains no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.keys.api_keys import KeyLimits, read_api_keys
from clotho.serving.auth import key_digest
from protocols.errors import ProfileError
from training_run.profile.load import load_profile, resolved_toml, write_profile

SECRET = "s3cret-of-alice"


def written(directory: Path, text: str, mode: int = 0o600) -> str:
    """Write a file of keys and return its path."""
    path = directory / "keys.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def test_keys_come_from_the_file_and_from_the_environment(tmp_path: Path) -> None:
    """Only their digests are kept; a limit that is absent does not apply."""
    text = f'[alice]\nkey = "{SECRET}"\nmax_requests = 2\ntokens_per_minute = 600\n[ci]\nkey_env = "CI_KEY"\n'
    alice, ci = read_api_keys(written(tmp_path, text), {"CI_KEY": "from-the-environment"})
    assert (alice.name, alice.digest) == ("alice", key_digest(SECRET.encode()))
    assert alice.limits == KeyLimits(max_requests=2, tokens_per_minute=600)
    assert (ci.name, ci.digest, ci.limits) == ("ci", key_digest(b"from-the-environment"), KeyLimits())
    assert SECRET not in repr(alice)
    assert read_api_keys("") == ()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_of_keys_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """A file that only names environment variables may be readable."""
    with pytest.raises(ProfileError, match="chmod 600"):
        read_api_keys(written(tmp_path, f'[a]\nkey = "{SECRET}"\n', mode))
    assert read_api_keys(written(tmp_path, '[a]\nkey_env = "K"\n', mode), {"K": SECRET})


@pytest.mark.parametrize(
    "text",
    [
        "", "not toml = = s3cret", f'key = "{SECRET}"', f'["bad name"]\nkey = "{SECRET}"', "[a]\nmax_requests = 1",
        f'[a]\nkey = "{SECRET}"\nkey_env = "K"', '[a]\nkey_env = "UNSET"', '[a]\nkey = "s3cret"',
        '[a]\nkey = "s3cret with spaces"', '[a]\nkey = "s3cret-ümlaut"',
        f'[a]\nkey = "{SECRET}"\n[b]\nkey = "{SECRET}"', f'[a]\nkey = "{SECRET}"\nmax_requests = 0',
        f'[a]\nkey = "{SECRET}"\nunknown = "s3cret"', f'[a]\nkey = ["{SECRET}"]',
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_without_keys(tmp_path: Path, text: str) -> None:
    """The line names the file."""
    with pytest.raises(ProfileError) as refusal:
        read_api_keys(written(tmp_path, text), {})
    assert "keys.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert "s3cret" not in str(refusal.value)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    """With exit status 2."""
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ProfileError) as refusal:
            read_api_keys(str(path))
        assert refusal.value.exit_status == 2


def test_copies_of_the_profile_contain_the_path_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of keys permits an address that other machines reach, and is found beside the working directory."""
    written(tmp_path, f'[alice]\nkey = "{SECRET}"\n')
    monkeypatch.chdir(tmp_path)
    profile = load_profile("local-m3", {"server.host": "0.0.0.0", "server.api_keys_file": "keys.toml"})
    write_profile(profile, tmp_path / "profile.toml")
    assert str(tmp_path / "keys.toml") in resolved_toml(profile)
    assert SECRET not in (tmp_path / "profile.toml").read_text(encoding="utf-8")
