"""Checks of an attention, `eval.py FILE:NAME check`: what is wrong with it."""
