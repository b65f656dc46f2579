"""Files on disk: datasets in; adapters, checkpoints, run directories out."""
