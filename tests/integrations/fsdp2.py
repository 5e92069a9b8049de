"""Accelerate's FSDP2 on the CPU: it asks for GPUs where it reads its settings, and nowhere else."""

from __future__ import annotations

from typing import Any

__all__ = ["sharding"]


def sharding(accelerator: Any) -> Any:
    """From here on ``accelerator.prepare``, ``save_state`` and ``load_state`` do what they do for FSDP2."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2
    return accelerator
