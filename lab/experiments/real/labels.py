"""What the rows of the table on real data are called, and which optimizer each of them is built on."""

from __future__ import annotations

LABELS = {
    "onecycle": "OneCycle",
    "customary": "OneCycle, customary rate",
    "finder": "range test, then OneCycle",
    "auto": "auto",
    "auto-alone": "auto, `step()` alone",
    "placebo": "auto, placebo",
    "adamw-calibrated": "AdamW, one setting for all workloads",
    "nadamw-calibrated": "NadamW, one setting for all workloads",
    "schedulefree": "Schedule-Free AdamW or SGD, default rate",
    "schedulefree-tuned": "Schedule-Free AdamW or SGD, tuned",
    "schedulefree-own": "Schedule-Free around the workload's optimizer",
    "schedulefreeplus": "ScheduleFree+ (Adam)",
    "radamfree": "Schedule-Free RAdam",
    "prodigy": "Prodigy (Adam)",
    "prodigyplus": "Prodigy and Schedule-Free (Adam)",
    "dadaptation": "D-Adaptation (Adam, SGD or Lion)",
    "dog": "DoG, averaged (SGD)",
    "mechanic": "Mechanic around the workload's optimizer",
    "momo": "MoMo (Adam or SGD)",
    "cocob": "COCOB",
    "greedy": "GreedyLR around the workload's optimizer",
    "published": "HDET, corrected",
}
"""By name. OneCycle, auto and HDET are around the workload's optimizer, too."""
