"""Finds the learning rate in the run. Read :mod:`hdet.auto.search` first."""
