"""The packages that the actors are built from, one subject per package."""

__version__ = "0.1.0"
