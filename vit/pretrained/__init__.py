"""Pretrained weights: where they are, what model they are of, and how they are adapted."""
