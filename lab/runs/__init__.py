"""Whole training runs on the bundled tasks: planned, started on any number of ranks, compared."""
