"""What users construct: schedulers, ensembles, knobs, and what goes with them."""
