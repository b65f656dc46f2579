"""Sessions: who may see what, what ends with them, and requests that arrive twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from attachments.tinker.sessions import KEPT_RESULTS
from attachments.tinker.tests.tinker_server import Live, chunks, datum, tinker_server
from tests import saved_models

DATA = [datum([3, 9, 12, 7, 20, 5])]
KEYS = """
[ann]
key = "tml-ann-1"
[bob]
key = "tml-bob-1"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and API keys."""
    directory = tmp_path_factory.mktemp("sessions")
    saved_models.save(directory / "model", dtype=mx.float32)
    (directory / "keys.toml").write_text(KEYS)
    (directory / "keys.toml").chmod(0o600)
    return directory


@pytest.fixture(scope="module")
def live(place: Path) -> Iterator[Live]:
    """A server with keys, whose memory is enough for two small adapters and a pass of 16 tokens."""
    memory = ("--server.tinker.max-bytes", "2000000", "--server.tinker.micro-batch-tokens", "16")
    flags = ("--server.api-keys-file", str(place / "keys.toml"), *memory)
    with tinker_server(place / "model", place / "saved", *flags) as live:
        yield live


def test_no_key_sees_what_belongs_to_another(live: Live, place: Path) -> None:
    """Neither runs nor checkpoints, sessions, models, samplers or results."""
    ann, bob = live.client("tml-ann-1"), live.client("tml-bob-1")
    model_id = ann.model(str(place / "model"))
    path = ann.result("save_weights", model_id=model_id, path="mine")["path"]
    sampler = ann.sampler(model_id)
    request_id = ann.post("optim_step", model_id=model_id, adam_params={})["request_id"]
    assert [run["training_run_id"] for run in ann.get("training_runs")["training_runs"]] == [model_id]
    assert bob.get("training_runs")["training_runs"] == bob.get("checkpoints")["checkpoints"] == []
    assert bob.get("sessions")["sessions"] == [bob.session]
    for answer in (
        bob.respond("get_info", model_id=model_id),
        bob.respond("weights_info", tinker_path=path),
        bob.respond("retrieve_future", request_id=request_id),
        bob.respond("session_heartbeat", session_id=ann.session),
        bob.http.get(f"/api/v1/samplers/{sampler}"),
        bob.http.get(f"/api/v1/training_runs/{model_id}"),
        bob.http.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/mine"),
    ):
        assert answer.status_code == 404, answer.text
    assert bob.http.get("/api/v1/tenants").status_code == 403
    ann.post(f"sessions/{ann.session}/finish")


def test_a_session_that_ends_frees_its_memory(live: Live, place: Path) -> None:
    """Models, samplers and results are gone; what was saved stays. The heartbeat learns it from status 410."""
    client = live.client("tml-ann-1")
    model_id = client.model(str(place / "model"))
    path = client.result("save_weights", model_id=model_id, path="kept")["path"]
    client.sampler(model_id)
    session = live.service.sessions.open("")[-1]
    model = session.models[model_id]
    live.call(live.service.sessions.end, session, "a test ends it")
    assert client.respond("session_heartbeat", session_id=client.session).status_code == 410
    assert client.respond("get_info", model_id=model_id).status_code == 410
    other = live.client("tml-ann-1")
    other.result("load_weights", session_id=other.session, model_seq_id=1, path=path, optimizer=True)
    assert live.service.samplers.resident == 0
    assert model._trained is None
    other.post(f"sessions/{other.session}/finish")


def test_a_session_without_heartbeats_ends(place: Path) -> None:
    """After `heartbeat_seconds`."""
    flags = ("--server.tinker.heartbeat-seconds", "0.05")
    with tinker_server(place / "model", place / "short", *flags) as live:
        client = live.client()
        sessions = live.service.sessions.open("")
        for session in sessions:
            live.call(session.ended.wait)
        assert client.respond("session_heartbeat", session_id=client.session).status_code == 410


def test_a_model_that_does_not_fit_is_refused_at_once(live: Live, place: Path) -> None:
    """The message has the memory that it needs. One that has ended leaves room; long data need more than a model."""
    client = live.client("tml-ann-1")
    made = [client.model(str(place / "model"), rank=8)]
    call = {"session_id": client.session, "model_seq_id": 50, "base_model": str(place / "model")}
    refused = client.respond("create_model", **call, lora_config={"rank": 64})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_memory")
    client.result("unload_model", model_id=made[0])
    model_id = client.model(str(place / "model"), rank=8)
    given = {"data": [datum([3] * 100)], "loss_fn": "cross_entropy"}
    refused = client.respond("forward_backward", model_id=model_id, forward_backward_input=given)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_memory")
    client.post(f"sessions/{client.session}/finish")


def test_a_request_that_arrives_twice_counts_once(live: Live, place: Path) -> None:
    """The SDK repeats a request whose answer was lost: its number says that it is the same."""
    client = live.client("tml-ann-1")
    one, other = (client.model(str(place / "model"), seed=1) for _ in range(2))
    given = {"data": DATA, "loss_fn": "cross_entropy"}
    promises = [client.post("forward_backward", model_id=one, forward_backward_input=given, seq_id=1) for _ in range(2)]
    assert promises[0] == promises[1]
    client.gradient(other, DATA)
    steps = [client.step(model_id, learning_rate=1e-3) for model_id in (one, other)]
    assert steps[0]["grad_norm:max"] == steps[1]["grad_norm:max"]
    client.post(f"sessions/{client.session}/finish")


def test_a_result_can_be_read_again(live: Live, place: Path) -> None:
    """Its answer may be lost. A request that never was has status 410."""
    client = live.client("tml-ann-1")
    model_id = client.model(str(place / "model"))
    request_id = client.post("optim_step", model_id=model_id, adam_params={})["request_id"]
    answers = [client.respond("retrieve_future", request_id=request_id).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert client.respond("retrieve_future", request_id=f"{client.session}:0").status_code == 410
    client.post(f"sessions/{client.session}/finish")


def test_results_that_nobody_has_read_are_kept(live: Live, place: Path) -> None:
    """A program may read one of many results long before the others."""
    client = live.client("tml-ann-1")
    sampler = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=1, base_model=str(place / "model")
    )["sampling_session_id"]
    call = {"sampling_session_id": sampler, "prompt": chunks([3, 9]), "sampling_params": {"max_tokens": 1}}
    names = [client.post("asample", **call)["request_id"] for _ in range(KEPT_RESULTS + 2)]
    for name in reversed(names):
        assert client.respond("retrieve_future", request_id=name).status_code == 200
    client.post(f"sessions/{client.session}/finish")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("create_model", {"base_model": "Qwen/Qwen3-0.6B"}, "base_model"),
        ("create_model", {"optimizer_config": {"type": "dimuon"}}, None),
        ("create_model", {"lora_config": {"rank": 4096}}, "rank"),
        ("create_model", {"lora_config": {"train_attn": False, "train_mlp": False}}, "lora_config"),
        ("create_model", {"lora_config": {"rank": 4, "alpha": 3}}, "lora_config"),
    ],
)
def test_models_that_are_not_served_are_refused_by_name(
    live: Live, place: Path, path: str, body: dict[str, object], param: str | None
) -> None:
    """At once, with what is served."""
    client = live.client("tml-ann-1")
    call = {"session_id": client.session, "model_seq_id": 9, "base_model": str(place / "model"), **body}
    answer = client.respond(path, **call)
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] in (param, "alpha")
    client.post(f"sessions/{client.session}/finish")


def test_aliases_name_the_base_model(place: Path) -> None:
    """Such as the name that recipes have for it."""
    with tinker_server(place / "model", place / "alias", "--server.tinker.aliases", "Qwen/Qwen3-0.6B") as live:
        client = live.client()
        names = [one["model_name"] for one in client.get("get_server_capabilities")["supported_models"]]
        assert "Qwen/Qwen3-0.6B" in names
        model_id = client.model("Qwen/Qwen3-0.6B")
        data = client.post("get_info", model_id=model_id)["model_data"]
        assert (data["model_name"], data["tokenizer_id"]) == ("Qwen/Qwen3-0.6B", str(place / "model"))
