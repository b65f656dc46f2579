"""Datasets: files and repositories to problems, their order, and the report on a dataset."""
