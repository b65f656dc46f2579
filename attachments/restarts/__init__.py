"""Restarts of a run of one process."""
