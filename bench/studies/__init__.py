"""Studies: training runs of several arms and seeds, recorded one by one, on one runner (`bench.studies.runner`)."""
