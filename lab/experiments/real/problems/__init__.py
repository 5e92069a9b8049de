"""The tasks of the workloads, by kind of data: pools, held-out batches, models and losses."""
