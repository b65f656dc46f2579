"""Records of a run: metrics, logs, displays, findings and the summary."""
