"""The task of the profile `proof-customer`: a simulated customer, in the form of tau-bench."""
