"""Reads a run and says what is wrong with it."""
