"""Groups from environments: an Atropos API server, which the run starts or connects to, or its mock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from training_run.attachment import Attach, Attachment, Plan
from training_run.supervision.supervisor import permanent

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext


SERVER = "atropos server"
"""Name of the child that runs the API server."""


class Atropos(Attachment):
    """`atropos` and `[[environments]]` of a profile."""

    def slots(self, profile: Profile) -> Mapping[str, str]:
        """The groups, which environments sample on the HTTP server of the run."""
        from training_run.profile.schema import AtroposSource

        source = profile.atropos
        if not isinstance(source, AtroposSource):
            return {}
        setting = f'atropos = "{source.__struct_config__.tag}"'
        return {"groups": setting, "sampler": setting}

    def children(self, profile: Profile) -> Sequence[str]:
        """The API server and the environments."""
        return [SERVER, *(f"environment {environment.name}" for environment in profile.environments)]

    def check(self, profile: Profile) -> None:
        """Raise ProfileError unless environments can fill a batch, and interpreter, scripts and address exist."""
        from attachments.atropos.commands import require_environments
        from training_run.profile.schema import RunningServer

        require_environments(profile)
        if isinstance(profile.atropos, RunningServer):
            from attachments.atropos.client import require_address  # imports an HTTP client

            require_address(profile.atropos.url)

    def memory(self, need: MemoryNeed) -> None:
        """Environments send whole sequences."""
        from training_run.profile.schema import AtroposSource

        if need.profile is not None and isinstance(need.profile.atropos, AtroposSource):
            need.sequence_tokens = need.profile.atropos.max_tokens

    async def prepare(self, plan: Plan) -> Attach | None:
        """Have environments send the groups of the run, which sample on its HTTP server."""
        from training_run.profile.schema import AtroposSource, StartedServer

        source = plan.profile.atropos
        if not isinstance(source, AtroposSource):
            return None

        async def attach(run: RunContext) -> None:
            """Start the server and the environments that the run starts itself, and let the fetcher read from them."""
            from attachments.atropos.batch_source import group_supply, running_url, sample_log
            from attachments.atropos.processes import AtroposServer, Environment

            profile, attached, logs = run.profile, run.attached, run.directory.atropos
            server = AtroposServer(source.python, directory=logs) if isinstance(source, StartedServer) else None
            server_url = server.url if server else running_url(profile)
            attached.samples = samples = sample_log(profile)
            attached.groups = group_supply(run, source, samples, server_url=server_url)
            if server is not None:
                attached.services.append(permanent(server))
            for section in profile.environments:
                environment = Environment(
                    section,
                    profile,
                    server_url=server_url,
                    server_starts=lambda: server.starts if server else 0,
                    policy_url=run.address,
                    directory=logs,
                )
                attached.senders.append(permanent(environment))

        return attach


ATTACHMENT = Atropos()
