"""Groups of a run: from prompts to batches, and their conservation."""
