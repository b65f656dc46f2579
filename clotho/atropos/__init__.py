"""Groups from environments, by way of an Atropos API server: getting them, reading them, and running both sides."""
