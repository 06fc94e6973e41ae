"""What eval.py does: a report, attention maps, pictures of one's own, two models side by side."""
