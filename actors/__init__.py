"""The nine actors, one module each, in flow order."""
