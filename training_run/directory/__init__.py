"""The run directory: checkpoints, and the histories of a run."""
