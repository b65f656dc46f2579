"""Artifacts after training: adapters in other formats, and models with a merged adapter."""
