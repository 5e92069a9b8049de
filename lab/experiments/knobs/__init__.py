"""Knobs where they matter: hyperparameters of training on little data, found by arms that differ in them."""
