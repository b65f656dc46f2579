"""Training: from scored groups to new weights. `update` describes one update module by module."""
