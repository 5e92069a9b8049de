"""Replicas that are points of one model, probed at the end of every round: the way of ``max_lr="auto"``."""
