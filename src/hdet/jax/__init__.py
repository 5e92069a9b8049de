"""The search for the learning rate, and replica ensembles, for jax and optax: see docs/jax.md.

Nothing else in hdet imports this package, so that hdet needs no jax.
"""

from __future__ import annotations

try:
    import jax as _jax
    import optax as _optax
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"hdet.jax needs jax and optax, but {error.name} is not installed; install hdet with its extra: hdet[jax]"
    ) from error

from hdet.jax.search import AutoState, auto
from hdet.jax.telling import finish, found

__all__ = ["AutoState", "auto", "finish", "found"]
