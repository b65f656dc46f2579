"""The start of a run, new or resumed."""
