"""Output for people: reports, attention sheets, predictions for photos, comparisons."""
