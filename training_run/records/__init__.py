"""Monitoring: metrics, logs, displays, collapse detection."""
