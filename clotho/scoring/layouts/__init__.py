"""Layouts of the sequences in a micro-batch, and the computation of hidden states in each layout."""
