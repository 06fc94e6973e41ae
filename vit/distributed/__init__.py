"""The processes of a run: starting, communication, sharding, and who waits for whom."""
