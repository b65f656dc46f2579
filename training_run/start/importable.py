"""What a profile names besides its rewards is imported: custom actors, environments, and a custom objective."""

from __future__ import annotations

from attachments.atropos.commands import require_environments
from clotho.settings.objectives import Custom
from training_run.profile.schema import Profile, RunningServer
from training_run.supervision.custom_actors import load_factory


def require_importable(profile: Profile) -> None:
    """Import custom actors and a custom objective; check interpreter, scripts and API server of environments.

    Raises ProfileError.
    """
    for section in profile.actors:
        load_factory(section)
    require_environments(profile)
    if isinstance(profile.atropos, RunningServer):
        from attachments.atropos.client import require_address  # imports an HTTP client

        require_address(profile.atropos.url)
    if isinstance(profile.learner.objective, Custom):
        from clotho.training.objectives.registry import objective  # imports MLX

        objective(profile.learner.objective)
