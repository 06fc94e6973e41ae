"""Training runs: steps, checkpoints, run folders."""
