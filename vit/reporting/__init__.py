"""Output for people: reports, tables, records of attention, live models, model cards."""
