"""Small models of the kinds that people train.

All of them run under ``torch.func.vmap``: attention and recurrence are written out, and there is no dropout.
"""
