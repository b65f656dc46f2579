"""Profiles: schema, layers, rules and flags."""
