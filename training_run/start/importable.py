"""What a profile names besides its rewards is imported: custom actors, and a custom objective."""

from __future__ import annotations

from clotho.settings.objectives import Custom
from training_run.profile.schema import Profile
from training_run.supervision.custom_actors import load_factory


def require_importable(profile: Profile) -> None:
    """Import custom actors and a custom objective. Raises ProfileError."""
    for section in profile.actors:
        load_factory(section)
    if isinstance(profile.learner.objective, Custom):
        from clotho.training.objectives.functions import objective  # imports MLX

        objective(profile.learner.objective)
