"""Long, large and interrupted runs."""
