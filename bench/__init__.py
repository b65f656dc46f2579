"""Measurements: one question per module, each a program that writes what it found to `bench/results/`."""
