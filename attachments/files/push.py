"""The command `push`: upload an adapter, a model or a run to the Hugging Face hub, with a model card."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from attachments.files.model_card import CURVES, card_head, curves, model_card, read_run, usage
from clotho.data.records import HUB_REPOSITORY
from clotho.models.model_files import read_object
from clotho.storage.adapters import CONFIG
from protocols.errors import ClothoError, ProfileError, visible
from training_run.adapters.formats import MlxLmConfig, PeftConfig
from training_run.commands.command_line import CommandParser
from training_run.directory.checkpoints import MANIFEST
from training_run.profile.load import load_profile, resolved_toml
from training_run.records.terminal_text import print_line, size

CARD, PROFILE = "README.md", "profile.toml"
BASE_KEYS = (MlxLmConfig.base_key, PeftConfig.base_key)
SUFFIXES = (".json", ".jsonl", ".safetensors", ".jinja", ".model", ".txt", ".gguf", ".npz", ".md", ".svg")
TEXT_SUFFIXES = (".json", ".jsonl", ".jinja", ".txt", ".md", ".svg", ".toml")
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)
SECRET_TEXTS = re.compile(rb"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|ghp_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b")
SHORTEST_SECRET = 8
"""Length of the shortest value of an environment variable that counts as a secret."""


class PushError(ClothoError):
    """The hub refused an upload, or cannot be reached."""

    exit_status = 2


class Upload(Struct, frozen=True, kw_only=True):
    """One file of the repository: a file of this machine, or contents."""

    name: str
    source: Path | bytes

    @property
    def bytes(self) -> int:
        """Its size."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser("push", "Upload a run, an adapter or a model to the Hugging Face hub, with a model card.")
    found.add_argument("path", metavar="PATH", type=Path, help="directory of a run, an adapter or a model")
    found.add_argument("name", metavar="OWNER/NAME", help="repository, which is created if it does not exist")
    found.add_argument("--private", action="store_true", help="create the repository as a private one")
    found.add_argument("--dry-run", action="store_true", help="list the files and print the card; upload nothing")
    found.add_argument("--base-model", default="", metavar="NAME", help="base model on the hub; default: as recorded")
    found.add_argument("--message", default="Upload from Clotho", help="message of the commit")
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Upload; return the exit status. Raises ProfileError or PushError; nothing is uploaded then."""
    arguments = parser().parsed(argv, console)
    if arguments is None:
        return 0
    name = arguments.name
    if not HUB_REPOSITORY.fullmatch(name):
        raise ProfileError(f"{visible(name, 100)} is not OWNER/NAME, a name of a repository of the hub")
    found = uploads_of(arguments.path.expanduser(), name, arguments.base_model)
    uploads = sorted(found, key=lambda upload: upload.name)
    require_no_secrets(uploads)
    for upload in uploads:
        print_line(console, f"{size(upload.bytes):>8}B  {upload.name}")
    if arguments.dry_run:
        card = next(_contents(upload).decode(errors="replace") for upload in uploads if upload.name == CARD)
        console.print(Text(f"\n{card}"), soft_wrap=True, end="")
    else:
        address = upload_all(name, uploads, message=arguments.message, private=arguments.private)
        print_line(console, f"pushed to {address}")
    return 0


def uploads_of(path: Path, name: str, base_model: str) -> Iterator[Upload]:
    """The files to upload for a run directory, an adapter directory or a model directory. Raises ProfileError."""
    if not path.is_dir():
        raise ProfileError(f"{visible(str(path), 200)} is not a directory with a run, an adapter or a model")
    if (path / PROFILE).is_file() and not (path / MANIFEST).is_file():  # a checkpoint is an adapter
        yield from _run_uploads(path, name, base_model)
    elif (path / CONFIG).is_file():
        base = base_model or _base_of(path / CONFIG)
        yield from _artifact(path, base)
        if not (path / CARD).is_file():
            text = (
                f"{card_head(base)}\n\n# {name}\n\nAn adapter for `{base}`.\n\n{usage(name, base, is_adapter=True)}\n"
            )
            yield Upload(name=CARD, source=text.encode())
    elif (path / "config.json").is_file():
        yield from _files(path)
        if not (path / CARD).is_file():
            text = f"{card_head(base_model or name)}\n\n# {name}\n\n{usage(name, name, is_adapter=False)}\n"
            yield Upload(name=CARD, source=text.encode())
    else:
        raise ProfileError(f"{visible(str(path), 200)} contains no {PROFILE}, {CONFIG} or config.json")


def _run_uploads(path: Path, name: str, base_model: str) -> Iterator[Upload]:
    adapter = path / "adapters"
    if not adapter.is_dir() or not any(adapter.iterdir()):
        raise ProfileError(f"run {path} has no trained weights in {adapter}: let it end, or push a checkpoint")
    settings = tomllib.loads(resolved_toml(load_profile(str(path / PROFILE)), mask_secrets=True))
    base = base_model or _public(settings["model"]["path"])
    facts = read_run(path, settings, base)
    yield from _artifact(adapter, base)
    yield Upload(name=CARD, source=model_card(name, facts).encode())
    yield Upload(name=CURVES, source=curves(facts).encode())
    text = resolved_toml(load_profile(str(path / PROFILE)), mask_secrets=True)
    yield Upload(name=f"training/{PROFILE}", source=text.replace(str(Path.home()), "~").encode())
    for history in ("metrics.jsonl", "evaluations.jsonl"):
        if (path / history).is_file():
            yield Upload(name=f"training/{history}", source=path / history)


def _artifact(path: Path, base: str) -> Iterator[Upload]:
    """The files of an adapter. The path of a base model on this machine becomes the name of the base model."""
    for upload in _files(path):
        if upload.name != CONFIG:
            yield upload
            continue
        values = json.loads(_contents(upload))
        values |= dict.fromkeys(values.keys() & BASE_KEYS, base)
        yield Upload(name=CONFIG, source=json.dumps(values, indent=2).encode())


def _files(path: Path) -> Iterator[Upload]:
    for file in sorted(path.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.suffix in SUFFIXES:
            yield Upload(name=file.name, source=file)


def _base_of(config: Path) -> str:
    values = read_object(config)
    found = next((values[key] for key in BASE_KEYS if values.get(key)), None)
    if not isinstance(found, str):
        raise ProfileError(f"{config} does not name the base model: set --base-model")
    return _public(found)


def _public(path: str) -> str:
    """The name of a base model: a local path is reduced to its last part."""
    return path.rstrip("/").rpartition("/")[2] if path.startswith(("/", "~", ".")) or Path(path).exists() else path


def require_no_secrets(uploads: Sequence[Upload]) -> None:
    """Raise PushError if a text file contains a token, or the value of an environment variable with a secret."""
    values = {
        value.encode(): name
        for name, value in os.environ.items()
        if SECRET_NAMES.search(name) and len(value) >= SHORTEST_SECRET
    }
    for upload in uploads:
        if not upload.name.endswith(TEXT_SUFFIXES):
            continue
        contents = _contents(upload)
        found = next((name for value, name in values.items() if value in contents), "")
        if found or SECRET_TEXTS.search(contents):
            what = f"the value of the environment variable {found}" if found else "what looks like an access token"
            raise PushError(f"{upload.name} contains {what}: remove it; nothing was uploaded")


def upload_all(name: str, uploads: Sequence[Upload], *, message: str, private: bool) -> str:
    """Create the repository if it does not exist, and upload all files in one commit; returns its address."""
    api = HfApi(library_name="clotho")
    operations = [
        CommitOperationAdd(
            path_in_repo=upload.name,
            path_or_fileobj=upload.source if isinstance(upload.source, bytes) else str(upload.source),
        )
        for upload in uploads
    ]
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        return str(api.create_commit(name, operations, commit_message=message).commit_url)
    except LocalTokenNotFoundError as error:
        raise PushError("there is no access token for the hub: log in with `hf auth login`") from error
    except HfHubHTTPError as error:
        reason = visible(" ".join(str(error).split()), 200)
        raise PushError(f"the hub refused the upload to {name}: {reason}") from error
    except Exception as error:  # the exceptions of an HTTP library that differs between versions of the client
        reason = visible(" ".join(str(error).split()) or type(error).__name__, 200)
        raise PushError(f"the upload to {name} failed: {reason}") from error


def _contents(upload: Upload) -> bytes:
    return upload.source if isinstance(upload.source, bytes) else upload.source.read_bytes()
