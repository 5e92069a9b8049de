"""Replicas that train at different values, are averaged every round, and show by their losses where to go."""
