"""Tensors between replicas. Knows tensors, not learning rates; the only place that touches torch.distributed."""
