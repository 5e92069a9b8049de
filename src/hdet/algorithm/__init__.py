"""The method: numbers in, numbers out. No process group, file, clock, device or global RNG."""
