"""Storage: run directory, checkpoints, adapters, datasets, atomic files."""
