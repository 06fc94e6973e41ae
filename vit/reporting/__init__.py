"""What people look at: reports, attention sheets, predictions for photos, comparisons."""
