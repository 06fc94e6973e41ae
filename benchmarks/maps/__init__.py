"""What the maps of a model are worth."""
