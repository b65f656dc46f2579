"""Models in training: gradients that add up, steps of AdamW, and checkpoints that continue bit by bit."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from attachments.tinker.tests.tinker_server import Client, Live, datum, logprobs_of, tinker_server
from tests import saved_models

SEQUENCES = ([3, 9, 12, 7, 20, 5], [4, 4, 8], [3, 30, 31, 32, 33, 34, 35, 36])
DATA = [datum(tokens) for tokens in SEQUENCES]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model."""
    directory = tmp_path_factory.mktemp("tinker")
    saved_models.save(directory / "model", dtype=mx.float32)
    return directory


@pytest.fixture(scope="module")
def live(place: Path) -> Iterator[Live]:
    """A server of all tests of the module."""
    with tinker_server(place / "model", place / "saved") as live:
        yield live


@pytest.fixture
def client(live: Live) -> Client:
    """A session of its own."""
    return live.client()


def trained(client: Client, base: Path, steps: int, **model: Any) -> str:
    """Return a model after some steps."""
    model_id = client.model(str(base), **model)
    for _ in range(steps):
        client.gradient(model_id, DATA)
        client.step(model_id, learning_rate=1e-2)
    return model_id


def saved(client: Client, model_id: str, name: str) -> str:
    """Save the state of training, and return its path."""
    return str(client.result("save_weights", model_id=model_id, path=name)["path"])


def arrays(place: Path, path: str) -> dict[str, Any]:
    """Return the arrays of a state of training."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    found: Any = mx.load(str(place / "saved" / run.replace(":", "_") / kind / name / "state.safetensors"))
    return {key: np.array(value) for key, value in found.items()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """States are equal bit by bit."""
    assert one.keys() == other.keys()
    assert [name for name in one if not np.array_equal(one[name], other[name])] == []


def test_training_lowers_the_loss(client: Client, place: Path) -> None:
    """The loss is the sum of minus the log-probabilities, which forward returns."""
    model_id = client.model(str(place / "model"))
    before = client.forward(model_id, DATA)
    assert before["metrics"]["loss:sum"] == pytest.approx(-sum(map(sum, logprobs_of(before))), rel=1e-6)
    for _ in range(8):
        client.gradient(model_id, DATA)
        client.step(model_id, learning_rate=1e-2)
    assert client.forward(model_id, DATA)["metrics"]["loss:sum"] < 0.8 * before["metrics"]["loss:sum"]


def test_the_gradients_of_several_requests_add_up(client: Client, place: Path) -> None:
    """Losses are sums, so that data may come in any number of requests."""
    one, other = (client.model(str(place / "model"), seed=5) for _ in range(2))
    client.gradient(one, DATA)
    for row in DATA:
        client.gradient(other, [row])
    norms = [client.step(model_id, learning_rate=1e-3)["grad_norm:max"] for model_id in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_first_step_of_adamw_moves_every_weight_by_the_learning_rate(client: Client, place: Path) -> None:
    """|g| / (|g| + 1e-12) is 1: B, which is 0 at first, becomes plus or minus the rate."""
    model_id = client.model(str(place / "model"))
    client.gradient(model_id, DATA)
    client.step(model_id, learning_rate=1e-3)
    state = arrays(place, saved(client, model_id, "first"))
    b = [value for name, value in state.items() if name.startswith("parameters.") and name.endswith("lora_b")]
    moved = np.concatenate([np.abs(value[value != 0]) for value in b])
    assert moved.size > 100
    np.testing.assert_allclose(moved, 1e-3, rtol=1e-4)


def test_a_step_has_every_setting_of_the_client(client: Client, place: Path) -> None:
    """AdamW in float64, w - rate (m / (sqrt(v) + eps) + decay w), with a gradient that is clipped to its norm."""
    model_id = client.model(str(place / "model"))
    adam = {"learning_rate": 1e-2, "beta1": 0.5, "beta2": 0.75, "eps": 0.1, "weight_decay": 0.25}
    client.gradient(model_id, DATA)
    client.step(model_id, **adam)  # afterwards no gradient is zero
    before = arrays(place, saved(client, model_id, "before"))
    client.gradient(model_id, DATA)
    assert client.step(model_id, **adam, grad_clip_norm=0.5)["grad_norm:max"] > 0.5
    after = arrays(place, saved(client, model_id, "after"))
    squares = 0.0
    for name in [key.removeprefix("parameters.") for key in before if key.startswith("parameters.")]:
        kinds = ("parameters", "state.optimizer.adamw.m", "state.optimizer.adamw.v")
        (w, m, v), (new_w, new_m, new_v) = ([np.float64(one[f"{k}.{name}"]) for k in kinds] for one in (before, after))
        g = (new_m - 0.5 * m) / 0.5
        squares += np.square(g).sum()
        np.testing.assert_allclose(new_v, 0.75 * v + 0.25 * g**2, rtol=1e-3, atol=1e-9)
        change = new_m / 0.75 / (np.sqrt(new_v / (1 - 0.75**2)) + 0.1)
        np.testing.assert_allclose(new_w, w - 1e-2 * (change + 0.25 * w), rtol=1e-4, atol=1e-6)
    assert np.sqrt(squares) == pytest.approx(0.5, rel=1e-3)


def test_a_step_without_a_gradient_changes_nothing(client: Client, place: Path) -> None:
    """Its metrics say so."""
    model_id = trained(client, place / "model", 1)
    assert client.step(model_id, learning_rate=1e-2)["update_applied:min"] == 0.0


def test_a_gradient_of_zeros_is_a_step(client: Client, place: Path) -> None:
    """Moments decay, and they and the weight decay move the weights: w - rate (m / (sqrt(v) + eps) + decay w)."""
    model_id = trained(client, place / "model", 1)
    before = arrays(place, saved(client, model_id, "before"))
    client.gradient(model_id, [datum(SEQUENCES[0], weights=[0.0] * (len(SEQUENCES[0]) - 1))])
    metrics = client.step(model_id, learning_rate=1e-2, beta1=0.5, beta2=0.75, eps=0.1, weight_decay=0.25)
    assert (metrics["grad_norm:max"], metrics["update_applied:min"], metrics["version:max"]) == (0.0, 1.0, 2.0)
    after = arrays(place, saved(client, model_id, "after"))
    kinds = ("parameters", "state.optimizer.adamw.m", "state.optimizer.adamw.v")
    for name in [key.removeprefix("parameters.") for key in before if key.startswith("parameters.")]:
        (w, m, v), (new_w, new_m, new_v) = ([np.float64(one[f"{k}.{name}"]) for k in kinds] for one in (before, after))
        np.testing.assert_allclose(new_m, 0.5 * m, rtol=1e-6)
        np.testing.assert_allclose(new_v, 0.75 * v, rtol=1e-6)
        change = new_m / (1 - 0.5**2) / (np.sqrt(new_v / (1 - 0.75**2)) + 0.1)
        np.testing.assert_allclose(new_w, w - 1e-2 * (change + 0.25 * w), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_saved_state_continues(client: Client, place: Path, *, optimizer: bool) -> None:
    """With its optimizer bit by bit; without it, from the same weights and with an optimizer that has seen nothing."""
    model_id = trained(client, place / "model", 3, rank=8)
    path = saved(client, model_id, "third")
    call = {"session_id": client.session, "model_seq_id": 70 + optimizer, "path": path, "optimizer": optimizer}
    other = client.result("load_weights", **call)["model_id"]
    assert logprobs_of(client.forward(other, DATA)) == logprobs_of(client.forward(model_id, DATA))
    for one in (model_id, other):
        client.gradient(one, DATA)
        client.step(one, learning_rate=1e-2)
    states = [arrays(place, saved(client, one, "fourth")) for one in (model_id, other)]
    if optimizer:
        assert_same(*states)
    else:
        assert (int(states[0]["state.optimizer.step"]), int(states[1]["state.optimizer.step"])) == (4, 1)


def test_tenants_of_different_rank_that_alternate_compute_as_if_alone(live: Live, place: Path) -> None:
    """Each ends with the bits of a run that has the server to itself."""
    clients = [live.client(), live.client()]
    models = [one.model(str(place / "model"), rank=rank, seed=2) for one, rank in zip(clients, (8, 32), strict=True)]
    for _ in range(3):
        for one, model_id in zip(clients, models, strict=True):
            one.gradient(model_id, DATA)
        for one, model_id in zip(clients, models, strict=True):
            one.step(model_id, learning_rate=1e-2)
    for one, model_id, rank in zip(clients, models, (8, 32), strict=True):
        alone = trained(one, place / "model", 3, rank=rank, seed=2)
        assert_same(arrays(place, saved(one, model_id, "beside")), arrays(place, saved(one, alone, "alone")))


@pytest.mark.parametrize(("trains", "excluded"), [("attn", "mlp"), ("mlp", "self_attn")])
def test_a_model_may_train_attention_or_mlp_only(client: Client, place: Path, trains: str, excluded: str) -> None:
    """The other layers have no adapter."""
    flags = {"train_attn": trains == "attn", "train_mlp": trains == "mlp"}
    model_id = client.model(str(place / "model"), **flags)
    names = [name for name in arrays(place, saved(client, model_id, trains)) if name.startswith("parameters.")]
    assert names
    assert not [name for name in names if excluded in name]


def test_weights_for_samplers_are_an_adapter_of_mlx_lm(client: Client, place: Path) -> None:
    """`mlx_lm.load` computes the log-probabilities of the server."""
    model_id = trained(client, place / "model", 3)
    path = client.result("save_weights_for_sampler", model_id=model_id, path="final")["path"]
    run, kind, name = path.removeprefix("tinker://").split("/")
    adapter = place / "saved" / run.replace(":", "_") / kind / name
    model: Any = mlx_lm.load(str(place / "model"), adapter_path=str(adapter))[0]
    tokens = SEQUENCES[0]
    logits = model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
    logp = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[range(5), tokens[1:]]
    (found,) = logprobs_of(client.forward(model_id, DATA[:1]))
    np.testing.assert_allclose(found, logp, atol=1e-4)


def test_checkpoints_are_listed_copied_and_deleted(client: Client, place: Path) -> None:
    """The Rest client sees runs, checkpoints, their sizes and their limits on time."""
    model_id = trained(client, place / "model", 2)
    path = saved(client, model_id, "kept")
    (listed,) = client.get(f"training_runs/{model_id}/checkpoints")["checkpoints"]
    assert (listed["checkpoint_id"], listed["tinker_path"]) == ("weights/kept", path)
    assert listed["size_bytes"] > 1000
    assert client.post("weights_info", tinker_path=path)["lora_rank"] == 4
    copied = client.post("copy_weights", source_path=path)["tinker_path"]
    assert_same(arrays(place, path), arrays(place, copied))
    one = f"/api/v1/training_runs/{model_id}/checkpoints/weights/kept"
    assert client.http.get(f"{one}/archive").status_code == 302
    archive = client.http.get(f"{one}/archive", headers={"accept": "application/gzip"}).content
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        assert {"adapters.safetensors", "adapter_config.json"} <= set(files.getnames())
        assert "state.safetensors" not in files.getnames()
    assert client.http.put(f"{one}/ttl", json={"ttl_seconds": 3600}).status_code == 200
    assert client.get(f"training_runs/{model_id}")["last_checkpoint"]["expires_at"] is not None
    assert client.http.delete(one).status_code == 200
    assert client.get(f"training_runs/{model_id}/checkpoints")["checkpoints"] == []


def test_lists_come_in_pages(client: Client, place: Path) -> None:
    """With where a page begins, how long it may be, and how many entries there are."""
    for _ in range(2):
        client.model(str(place / "model"), rank=1)
    whole = client.get("training_runs?limit=1000")["training_runs"]
    page = client.get("training_runs?offset=1&limit=1")
    assert page["training_runs"] == whole[1:2]
    assert page["cursor"] == {"offset": 1, "limit": 1, "total_count": len(whole)}


def test_a_name_is_not_used_twice(client: Client, place: Path) -> None:
    """Unless the client says that it may be."""
    model_id = trained(client, place / "model", 1)
    saved(client, model_id, "same")
    again = client.respond("save_weights", model_id=model_id, path="same")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "path")
    client.result("save_weights", model_id=model_id, path="same", overwrite=True)


@pytest.mark.parametrize("request_name", ["save_weights", "save_weights_for_sampler"])
def test_a_name_stays_in_its_directory(client: Client, place: Path, request_name: str) -> None:
    """A name that is a path, hidden or too long is refused before anything is written."""
    model_id = client.model(str(place / "model"))
    for name in ("../other", "a/b", ".hidden", "n" * 129, ""):
        answer = client.respond(request_name, model_id=model_id, path=name)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
