"""The rule of the search in plain numbers: what torch, jax and the slow twin have in common. Nothing here knows torch.

:mod:`~hdet.rule.constants` and :mod:`~hdet.rule.enums` are shared by all three, the arithmetic by torch and jax.
Start with :mod:`~hdet.rule.decision`, which says what follows from a round.
"""
