"""Rollout workers on a Ray cluster: decode engines in processes of their own, on this machine or on others."""
