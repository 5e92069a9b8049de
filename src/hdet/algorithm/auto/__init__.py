"""The rule behind ``max_lr="auto"``: numbers in, orders out. The engine and the experiments carry the orders out."""
