"""Finds the learning rate in the run. Read :mod:`hdet.search.search` first."""
