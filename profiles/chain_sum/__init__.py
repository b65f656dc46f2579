"""The task of the profile `proof-chain-sum`: a dataset of Reasoning Gym."""
