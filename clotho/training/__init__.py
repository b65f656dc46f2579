"""Training: update, advantages, objectives, optimizers, replay, rollback."""
