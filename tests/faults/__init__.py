"""Faults: ranks that are killed, silent or late, and disks that are full; what survives them."""
