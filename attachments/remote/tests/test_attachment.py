"""What inference servers add to a run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from attachments.remote import attachment
from attachments.remote.sampler import RemoteSampler
from tests.training_run.built_context import open_context, tiny_profile
from training_run.directory.run_directory import open_run
from training_run.start.startup import Plan

SERVERS = {"type": "remote", "server_url": ["http://127.0.0.1:1", "http://127.0.0.1:1", "http://127.0.0.1:2"]}


async def test_servers_sample_in_the_place_of_the_engine(tmp_path: Path) -> None:
    """Their sampler starts before those that make groups, and receives every update. No server is used twice."""
    async with open_context(tiny_profile(tmp_path, generator=SERVERS)) as run:
        attached = run.attached
        assert isinstance(attached.sampler, RemoteSampler)
        assert [child.actor for child in attached.receivers] == [attached.sampler]
        assert list(attached.updates) == [attached.sampler.name]
        names = [server.name for server in attached.sampler.gauges().servers]
        assert names == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


@pytest.mark.parametrize("generator", ["local", SERVERS], ids=["local", "remote"])
async def test_log_probabilities_of_servers_are_compared(tmp_path: Path, generator: object) -> None:
    """Updates then return the values of their tokens."""
    profile = tiny_profile(tmp_path, generator=generator)
    directory = open_run(Path(profile.run_dir), resume=False, clean=False)
    with ExitStack() as ending:
        ending.callback(directory.close)
        plan = Plan(profile=profile, directory=directory, ending=ending)
        await attachment.prepare(plan)
        assert plan.token_values == (generator != "local")


def test_routes_are_not_replayed_from_servers(tmp_path: Path) -> None:
    """`router_replay = "on"` is a complaint, because answers have no routes; "auto" counts none."""
    for mode, complaints in (("auto", []), ("on", ["learner.router_replay"])):
        profile = tiny_profile(tmp_path, generator=SERVERS, learner={"router_replay": mode})
        assert [complaint.key for complaint in attachment.complaints(profile)] == complaints


def test_mlx_lm_server_samples_with_what_its_log_probabilities_contain(tmp_path: Path) -> None:
    """Temperature, `max_tokens` and `logit_bias`; other parameters are complaints."""
    restarted = SERVERS | {"weights": "restart"}
    for sampling, complaints in (({}, []), ({"min_p": 0.1}, ["sampling.min_p"])):
        profile = tiny_profile(tmp_path, generator=restarted, sampling={"logit_bias": [[5, 1.0]], **sampling})
        assert [complaint.key for complaint in attachment.complaints(profile)] == complaints
