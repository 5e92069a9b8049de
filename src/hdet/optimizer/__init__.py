"""What hdet reads and writes of torch's optimizers: their groups, their rates, and hooks on their steps."""
