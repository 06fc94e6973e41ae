"""The processes of a run: starting, communication, sharding, and signals."""
