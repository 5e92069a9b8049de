"""Replicas that train apart and are merged every round: the published way."""
