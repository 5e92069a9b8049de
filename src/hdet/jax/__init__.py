"""The search for the learning rate, and replica ensembles, for jax and optax: see docs/jax.md.

Nothing else in hdet imports this package, so that hdet needs no jax.
"""

from __future__ import annotations

try:
    from hdet.jax.search import auto
    from hdet.jax.state import AutoState, finish, found
except ModuleNotFoundError as error:
    if error.name not in ("jax", "optax"):
        raise
    raise ModuleNotFoundError(
        f"hdet.jax needs jax and optax, but {error.name} is not installed; install hdet with its extra: hdet[jax]",
        name=error.name,
    ) from error

__all__ = ["AutoState", "auto", "finish", "found"]
