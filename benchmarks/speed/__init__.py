"""How fast training, inference and loading are."""
