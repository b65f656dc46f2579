"""Groups from environments: an Atropos API server, which the run starts or connects to, or its mock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from training_run.attachment import Attachment

if TYPE_CHECKING:
    from training_run.profile.schema import Profile


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

    def check(self, profile: Profile) -> None:
        """Raise ProfileError unless environments can fill a batch, and interpreter, scripts and address exist."""
        from attachments.atropos.commands import require_environments
        from training_run.profile.schema import RunningServer

        require_environments(profile)
        if isinstance(profile.atropos, RunningServer):
            from attachments.atropos.client import require_address  # imports an HTTP client

            require_address(profile.atropos.url)


ATTACHMENT = Atropos()
