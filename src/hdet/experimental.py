"""Parts that have not been measured yet, and may change: another merge than the mean."""

from hdet.ensemble.outer import Outer

__all__ = ["Outer"]
