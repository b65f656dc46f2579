"""Atropos: groups from environments, and the processes that produce them."""
