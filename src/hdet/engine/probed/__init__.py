"""One model whose learning rate is searched, probed at the end of every round: the way of ``max_lr="auto"``."""
