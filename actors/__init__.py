"""The boxes: one module per actor, in flow order."""
