"""Measurements of the project; run a script with `python -m`, from the folder of the repository."""
