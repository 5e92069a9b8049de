"""Parts that have not been measured yet, and may change: other merges than the mean, and rounds within nodes."""

from hdet.engine.trained.inner import Inner
from hdet.engine.trained.outer import Elastic, Outer

__all__ = ["Elastic", "Inner", "Outer"]
