"""A data-parallel learner: every rank computes the gradient of a share of each batch, and the gradients are added."""
