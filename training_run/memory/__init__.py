"""Memory estimate of a run, made before any weight is read."""
