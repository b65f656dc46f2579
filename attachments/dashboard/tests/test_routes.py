"""The HTTP API of the dashboard: responses, access control, and hostile requests and run directories."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from attachments.dashboard.tests.synthetic_run import FINDING, RunShape, made_groups, write_run
from attachments.dashboard.tests.viewed_runs import viewing
from training_run.directory.jsonl import encode
from training_run.profile.load import MASK

SHAPE = RunShape(groups=36, steps=4, planned_steps=6, token_steps=1)
API = "/dashboard/api/runs"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 36 groups."""
    return write_run(tmp_path_factory.mktemp("routes") / "first", SHAPE)


async def test_state_and_settings_combine_all_files(run: Path) -> None:
    """Progress, settings that differ from the defaults, findings, and the outcomes of groups."""
    async with viewing(run) as viewed:
        assert (await viewed.http.get(API)).json() == {
            "runs": [{"id": "0", "name": "first", "path": str(run), "live": False}]
        }
        state, about = (await viewed.get("rows"))["state"], await viewed.get("about")
        assert (state["step"], state["planned_steps"], state["policy_version"]) == (4, 6, 4)
        assert state["seconds"] == 12.01
        assert state["findings"] == [FINDING]
        assert state["outcomes"]["trained"] == 18
        assert sum(state["outcomes"].values()) == 36
        assert (state["seconds_left"], state["in_flight"], state["waiting_for"]) == (None, None, "")
        assert about["profile"]["learner"]["batch_size"] == 8
        assert about["profile_changes"]["learner.batch_size"] == 8
        assert "policy.method.rank" not in about["profile_changes"], "it has the default"
        assert "seed" not in about["profile_changes"]
        assert about["profile_changes"]["rewards"][1] == {"name": "math_eval", "correct": True}
        assert about["preflight"]["findings"] == [FINDING]
        assert "clip_fraction" in about["descriptions"]


async def test_the_planned_steps_of_a_run_in_stages_are_those_of_its_chosen_stages(run: Path, tmp_path: Path) -> None:
    """The key `steps` of such a profile has no effect."""
    text = (run / "profile.toml").read_text(encoding="utf-8").replace("stages = []\n", "")
    tables = '\n[[stages]]\nkind = "sft"\nsteps = 3\n\n[[stages]]\nkind = "rl"\nsteps = 2\n'
    for chosen, planned in (("all", 5), ("rl", 2)):
        staged = shutil.copytree(run, tmp_path / chosen)
        top = text.replace('stage = "all"\n', "")
        (staged / "profile.toml").write_text(f'stage = "{chosen}"\n{top}{tables}', encoding="utf-8")
        async with viewing(staged) as viewed:
            assert (await viewed.get("rows"))["state"]["planned_steps"] == planned


async def test_groups_are_listed_searched_and_returned(run: Path) -> None:
    """The record is the line of rollouts.jsonl."""
    records = list(made_groups(SHAPE))
    async with viewing(run) as viewed:
        assert (await viewed.get("rows?groups="))["groups"]["columns"]["group_id"] == list(range(36))
        answer = await viewed.http.get(f"{API}/0/groups/17")
        assert answer.content == encode(records[17])
        assert (await viewed.get("groups/search?text=ONERROR="))["group_ids"] == [1]
        missing = await viewed.http.get(f"{API}/0/groups/1/tokens")
        assert (missing.json()["completions"], bool(missing.json()["reason"])) == ([], True)


async def test_the_tokens_of_a_group_are_returned_by_completion(run: Path) -> None:
    """With their values; null for values that do not exist."""
    record = next(group for group in made_groups(SHAPE) if group["step"] == 4 and group["outcome"] == "trained")
    async with viewing(run) as viewed:
        completions = (await viewed.get(f"groups/{record['group_id']}/tokens"))["completions"]
    assert ["".join(one["text"]) for one in completions] == [one["text"] for one in record["completions"]]
    for one in completions:
        assert {len(values) for values in one.values()} == {len(one["tokens"])}


async def test_metrics_evaluations_and_timeline_are_columns(run: Path) -> None:
    """A step without an update has null values."""
    async with viewing(run) as viewed:
        found = await viewed.get("rows?metrics=&evaluations=&timeline=")
        metrics = found["metrics"]["columns"]
        assert metrics["step"] == [1, 2, 3, 4]
        assert metrics["loss"][2] is None
        assert metrics["rewards/format/mean"][3] == 1.0
        assert found["evaluations"]["columns"]["step"] == [0, 2, 4]
        assert len(found["timeline"]["columns"]["t"]) == 12


async def test_a_range_of_the_metrics_or_the_timeline_can_be_requested(run: Path) -> None:
    """By step, or by the age of the run. Ends that are no numbers are refused."""
    async with viewing(run) as viewed:
        assert (await viewed.get("metrics?from=2&to=3"))["columns"]["step"] == [2, 3]
        assert len((await viewed.get("timeline?from=3&to=7.5"))["columns"]["t"]) == 6
        for query in ("?from=x&to=3", "?from=2", ""):
            assert (await viewed.http.get(f"{API}/0/metrics{query}")).status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        f"{API}/1/about", f"{API}/-1/rows", f"{API}/x/rows", f"{API}/٣/rows", f"{API}/0/groups/99",
        f"{API}/0/groups/{10**30}", f"{API}/0/groups/-1", f"{API}/0/nothing", "/dashboard/static/../__init__.py",
        "/dashboard/static/%2e%2e/routes.py", "/dashboard/static/", "/dashboard/static//etc/passwd", "/nowhere",
    ],
)  # fmt: skip
async def test_what_does_not_exist_is_not_found(run: Path, path: str) -> None:
    """As JSON; no path leaves the page or the run directory."""
    async with viewing(run) as viewed:
        answer = await viewed.http.get(path)
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (404, True)


@pytest.mark.parametrize("text", ["", "x" * 1001])
async def test_a_search_without_a_usable_text_is_refused(run: Path, text: str) -> None:
    """The error names the parameter."""
    async with viewing(run) as viewed:
        answer = await viewed.http.get(f"{API}/0/groups/search", params={"text": text})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")


async def test_the_page_needs_no_key_and_the_data_do(run: Path) -> None:
    """A browser cannot send a key when it loads a page."""
    async with viewing(run, api_key="secret") as viewed:
        for path in ("/", "/dashboard/static/app.js"):
            assert (await viewed.http.get(path)).status_code == 200
        for path in (API, f"{API}/0/about", f"{API}/0/rows", f"{API}/0/groups/1"):
            assert (await viewed.http.get(path)).status_code == 401
            assert (await viewed.http.get(f"{path}?key=secret")).status_code == 401
        allowed = await viewed.http.get(f"{API}/0/about", headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200


async def test_other_web_sites_are_refused(run: Path) -> None:
    """By the Host header (DNS rebinding) and by the Origin header; no response permits other origins."""
    async with viewing(run) as viewed:
        for headers in ({"host": "evil.com"}, {"origin": "http://evil.com"}):
            for path in ("/", API):
                assert (await viewed.http.get(path, headers=headers)).status_code == 400
        answer = await viewed.http.get(API, headers={"origin": viewed.url})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_data_are_not_stored_and_not_interpreted(run: Path) -> None:
    """The record of a group can contain markup."""
    async with viewing(run) as viewed:
        for path in ("about", "rows?groups=", "groups/1", "metrics?from=0&to=9"):
            headers = (await viewed.http.get(f"{API}/0/{path}")).headers
            assert headers["content-type"] == "application/json"
            assert headers["cache-control"] == "no-store"
            assert headers["x-content-type-options"] == "nosniff"


async def test_secrets_are_hidden(run: Path, tmp_path: Path) -> None:
    """In the profile and among the changes, also in keys that this version does not know."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    profile = (copy / "profile.toml").read_text()
    (copy / "profile.toml").write_text(profile.replace('api_key = ""', 'api_key = "hunter2"'))
    async with viewing(copy) as viewed:
        answer = await viewed.http.get(f"{API}/0/about")
        assert "hunter2" not in answer.text
        assert answer.json()["profile_changes"]["server.api_key"] == MASK
        (copy / "profile.toml").write_text('[other]\nauth_token = "hunter2"\nmax_tokens = 5\n')
    async with viewing(copy) as viewed:
        about = await viewed.get("about")
        assert about["profile"] == {"other": {"auth_token": MASK, "max_tokens": 5}}
        assert about["profile_changes"] == {}


def linked(run: Path, directory: Path) -> Path:
    """Make a directory with a link to each entry of a run."""
    directory.mkdir()
    for entry in run.iterdir():
        (directory / entry.name).symlink_to(entry)
    return directory


async def test_links_in_a_run_directory_are_not_followed(run: Path, tmp_path: Path) -> None:
    """A run directory can come from outside."""
    hostile = linked(run, tmp_path / "hostile")
    async with viewing(hostile) as viewed:
        found, about = await viewed.get("rows?metrics="), await viewed.get("about")
        assert found["metrics"]["columns"] == {}
        assert (about["profile"], about["preflight"], found["state"]["outcomes"]) == (None, None, {})
        (hostile / "rollouts.jsonl").unlink()
        shutil.copy(run / "rollouts.jsonl", hostile)
    async with viewing(hostile) as viewed:
        assert (await viewed.http.get(f"{API}/0/groups/35")).status_code == 200
        answer = await viewed.http.get(f"{API}/0/groups/35/tokens")
        assert (answer.json()["completions"], bool(answer.json()["reason"])) == ([], True)


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"\xff" * 16, b"\x08\0\0\0\0\0\0\0{}      "])
async def test_damaged_token_values_are_an_error_of_their_group(run: Path, tmp_path: Path, damage: bytes) -> None:
    """Everything else is shown."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "tokens" / "step-000004.safetensors").write_bytes(damage)
    async with viewing(copy) as viewed:
        answer = await viewed.http.get(f"{API}/0/groups/35/tokens")
        assert (answer.json()["completions"], bool(answer.json()["reason"])) == ([], True)
        assert (await viewed.http.get(f"{API}/0/groups/35")).status_code == 200


async def test_several_runs_are_served_side_by_side(run: Path, tmp_path: Path) -> None:
    """Each by its number."""
    other = write_run(tmp_path / "other", RunShape(groups=4, steps=2, token_steps=0))
    async with viewing(run, other) as viewed:
        assert [one["name"] for one in (await viewed.http.get(API)).json()["runs"]] == ["first", "other"]
        assert (await viewed.get("rows", 1))["state"]["step"] == 2
        assert (await viewed.get("rows", 0))["state"]["step"] == 4
