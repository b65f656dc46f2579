"""What a cluster adds to a run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from attachments.cluster import attachment
from attachments.cluster.reward_worker import ClusterRewards
from attachments.remote.sampler import RemoteSampler
from tests.training_run.built_context import open_context, tiny_profile
from training_run.directory.run_directory import open_run
from training_run.start.startup import Plan


async def test_workers_of_a_cluster_compute_rewards(tmp_path: Path) -> None:
    """Before the policy is loaded, and before anything connects to the cluster."""
    profile = tiny_profile(tmp_path, cluster="ray")
    directory = open_run(Path(profile.run_dir), resume=False, clean=False)
    with ExitStack() as ending:
        ending.callback(directory.close)
        plan = Plan(profile=profile, directory=directory, ending=ending)
        await attachment.prepare(plan)
        assert isinstance(plan.workers["cluster"], ClusterRewards)
        assert plan.token_values


async def test_the_engine_of_the_run_is_one_of_the_workers_if_it_has_a_share(tmp_path: Path) -> None:
    """The others join when the run samples."""
    for number, share in enumerate((0.0, 0.5)):
        cluster = {"type": "ray", "local_share": share}
        profile = tiny_profile(tmp_path, cluster=cluster, run_dir=str(tmp_path / f"run{number}"))
        async with open_context(profile) as run:
            assert isinstance(run.attached.sampler, RemoteSampler)
            assert [server.name for server in run.attached.sampler.gauges().servers] == ["local"] * bool(share)
