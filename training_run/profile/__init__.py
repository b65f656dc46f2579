"""Profiles: schema, layers, rules, flags and the generated reference page."""
