"""The command `push`: what is uploaded, the model card, and secrets that are never uploaded."""

from __future__ import annotations

import base64
import json
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard, ModelCardData
from msgspec.structs import replace

from attachments.files.model_card import RunFacts, curves, model_card
from tests.training_run.records.display_examples import MEASURES, evaluation, ungraded_evaluation
from training_run.__main__ import main
from training_run.profile.load import load_profile, resolved_toml

EVALUATION = {
    "step": 0, "policy_version": 0, "accuracy": 0.25, "accuracy_interval": [0.2, 0.3],
    "accuracy_by_type": {"sum": 0.25}, "problems": 40, "ungraded": 0,
    "completion_tokens": 9, "time/evaluation": 0.1, "time/run": 1.0, "final": False,
}  # fmt: skip
KEY = "key-of-the-server-1234"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a finished run with an API key in its profile."""
    directory = tmp_path / "run"
    (directory / "adapters").mkdir(parents=True)
    profile = load_profile("local-m3", {"server.api_key": KEY})
    (directory / "profile.toml").write_text(resolved_toml(profile))
    config = {"model": str(Path.home() / "models" / "base"), "fine_tune_type": "lora"}
    (directory / "adapters" / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapters" / "adapters.safetensors").write_bytes(bytes(64))
    (directory / "adapters" / ".lock").touch()
    metrics = [{"step": step, "reward/mean": step / 10} for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics) + '{"step": 4, "rew')
    last = EVALUATION | {"step": 3, "accuracy": 0.75, "accuracy_by_type": {"sum": 0.75}, "final": True}
    (directory / "evaluations.jsonl").write_text(f"{json.dumps(EVALUATION)}\n{json.dumps(last)}\n")
    return directory


class Hub:
    """A server with the part of the hub's API that an upload uses; stores the files of the last commit."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: dict[str, Any] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                answer: dict[str, Any] = {"errors": [], "warnings": []}
                if self.path == "/api/repos/create":
                    hub.created = json.loads(body)
                    answer = {"url": f"{hub.address}/me/name"}
                elif "/preupload/" in self.path:
                    files = json.loads(body)["files"]
                    answer = {
                        "files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
                    }
                elif "/commit/" in self.path:
                    for entry in map(json.loads, body.splitlines()):
                        if entry["key"] == "file":
                            value = entry["value"]
                            hub.files[value["path"]] = base64.b64decode(value["content"])
                    answer = {"success": True, "commitOid": "0", "commitUrl": f"{hub.address}/me/name/commit/0"}
                text = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The client of the hub is the real one; its server is local."""
    local = Hub()
    thread = threading.Thread(target=local.server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", local.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "token-for-the-local-hub")
    yield local
    local.server.shutdown()
    thread.join()
    local.server.server_close()


def test_a_run_is_uploaded_with_card_curves_and_histories(run: Path, hub: Hub) -> None:
    """In one commit. No file contains the API key or the home directory."""
    assert main(["push", str(run), "me/name", "--private"]) == 0
    assert hub.created["name"] == "name"
    assert set(hub.files) == {
        "README.md", "adapter_config.json", "adapters.safetensors", "curves.svg", "training/evaluations.jsonl",
        "training/metrics.jsonl", "training/profile.toml",
    }  # fmt: skip
    assert json.loads(hub.files["adapter_config.json"])["model"] == "embedded"
    assert hub.files["curves.svg"].count(b"<polyline") == 2
    for contents in hub.files.values():
        assert KEY.encode() not in contents
        assert str(Path.home()).encode() + b"/" not in contents


def test_the_card_has_the_held_out_accuracy_and_the_settings(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A dry run prints the card and the list of files, and uploads nothing."""
    assert main(["push", str(run), "me/name", "--dry-run", "--base-model", "Qwen/Qwen3-0.6B"]) == 0
    text = capfd.readouterr().out
    for part in ("base_model: Qwen/Qwen3-0.6B", "25.0%", "75.0%", "| objective | grpo |", "3 updates", "curves.svg"):
        assert part in text


def test_the_card_has_every_measure_and_shows_missing_values_as_missing(run: Path) -> None:
    """Ungraded problems are counted. An evaluation without graded problems has no accuracy."""
    measured = replace(evaluation(3, 0.5, final=True), **MEASURES)
    records = [ungraded_evaluation(0), measured]
    facts = RunFacts(
        base_model="b", settings=tomllib.loads((run / "profile.toml").read_text()), metrics=(), evaluations=records
    )
    card = model_card("me/name", facts)
    for row in (
        "| all (500) | - | 50.0% (0.0% to 100.0%) |", "| word | - | 25.0% |", "| ungraded | 500 | 0 |",
        "| reward | - | 0.750 (0.625 to 0.875) |", "| pass@4 | - | 75.0 % (62.5 % to 87.5 %) |",
        "| length | - | 21.5 |",
    ):  # fmt: skip
        assert row in card
    assert curves(facts).count("<polyline") == 2


def test_the_card_declares_the_measures_of_the_last_evaluation(run: Path) -> None:
    """In the form of a model index, which the hub lists beside the model. Without an evaluation there is no index."""
    settings = tomllib.loads((run / "profile.toml").read_text())
    measured = replace(evaluation(3, 0.5, final=True), **MEASURES)
    with_results, without = (
        ModelCard(model_card("me/name", RunFacts(base_model="b", settings=settings, metrics=(), evaluations=records)))
        for records in ([measured], [])
    )
    assert isinstance(with_results.data, ModelCardData)
    results = with_results.data.eval_results or []
    assert {one.metric_type: one.metric_value for one in results} == {
        "accuracy": 0.5, "pass@2": 0.625, "pass@4": 0.75, "avg@4": 0.5,
    }  # fmt: skip
    assert {one.dataset_type for one in results} == {Path(settings["data"]["heldout"]).name}
    assert "model-index" not in str(without)


@pytest.mark.parametrize("config", ["adapter_config.json", "config.json"])
def test_adapters_and_models_are_uploaded_with_their_own_card(config: str, tmp_path: Path, hub: Hub) -> None:
    """A card that exists is kept; hidden files and files of other kinds stay."""
    (tmp_path / config).write_text(json.dumps({"base_model_name_or_path": "a/b"}))
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    (tmp_path / "notes.py").write_text("print()")
    assert main(["push", str(tmp_path), "me/name"]) == 0
    assert set(hub.files) == {config, "README.md", "model.safetensors"}
    assert hub.files["README.md"] == b"mine"


@pytest.mark.parametrize("secret", ["hf_" + "a" * 34, "the-value-of-a-secret"], ids=["token", "environment"])
def test_a_file_with_a_secret_is_not_uploaded(
    run: Path, hub: Hub, secret: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file and the kind of the secret are named, not the secret."""
    monkeypatch.setenv("MY_API_KEY", "the-value-of-a-secret")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "note": secret}))
    assert main(["push", str(run), "me/name"]) == 2
    error = capfd.readouterr().err
    assert "training/metrics.jsonl" in error
    assert secret not in error
    assert not hub.files


@pytest.mark.parametrize(
    "words", [[], ["x"], [".", "no name/x y"], ["nowhere", "me/name"], [".", "me/name", "--x", "1"]]
)
def test_arguments_that_cannot_be_used_are_refused(words: list[str], tmp_path: Path) -> None:
    """A path of a run, an adapter or a model, and the name of a repository."""
    assert main(["push", *(str(tmp_path) if word == "." else word for word in words)]) == 2


def test_a_hub_that_cannot_be_reached_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "token-for-the-local-hub")
    assert main(["push", str(run), "me/name"]) == 2
    assert capfd.readouterr().err.count("\n") == 1
