"""What a run keeps on disk: folder and lock, checkpoints, curves, and the decision to resume."""
