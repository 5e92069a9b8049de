"""The search for the learning rate, and replica ensembles, for jax and optax: see docs/jax.md."""
