"""Looking inside: attention maps and their pictures."""
