"""Training: the step, the loop, schedule and optimizers."""
