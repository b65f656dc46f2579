"""The packages that the actors are built from, one subject per package."""
