"""Evaluation with the harnesses that others use: lm-eval and inspect, beside the HTTP API of this project."""
