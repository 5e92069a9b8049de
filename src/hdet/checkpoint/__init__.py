"""Checkpoints: one file, all of it or nothing, on all ranks."""
