"""Clusters that are known by name, as the plain data of a cluster file.

In: nothing.  Out: `PRESETS`.  Next: `cluster.py`.
"""

from __future__ import annotations

from typing import Any

_GIB = 2.0**30
# (cluster, devices a host). cpu-gloo: one core a process, links inside the host and over 10 Gbit Ethernet.
# dgx-*: data sheets of the A100 80GB SXM and the H100 SXM; links per GPU as nccl-tests reports them.
PRESETS: dict[str, tuple[dict[str, Any], int]] = {
    "cpu-gloo": (
        {
            "device": {
                "type": "cpu",
                "memory_bytes": 4 * _GIB,
                "flops_per_s": {"float32": 40e9, "float64": 20e9, "bfloat16": 20e9, "float16": 10e9},
                "memory_bytes_per_s": 8e9,
                "launch_s": 5e-6,
                "reserve_bytes": 0.25 * _GIB,
            },
            "links": [
                {"devices": 64, "latency_s": 40e-6, "bytes_per_s": 1.2e9},
                {"devices": 128, "latency_s": 100e-6, "bytes_per_s": 0.6e9},
            ],
        },
        64,
    ),
    "dgx-a100-80": (
        {
            "device": {
                "type": "cuda",
                "memory_bytes": 80e9,
                "flops_per_s": {"float64": 9.7e12, "float32": 156e12, "bfloat16": 312e12, "float16": 312e12},
                "memory_bytes_per_s": 2.0e12,
                "launch_s": 6e-6,
                "reserve_bytes": 4 * _GIB,
            },
            "links": [
                {"devices": 8, "latency_s": 6e-6, "bytes_per_s": 230e9},
                {"devices": 16, "latency_s": 15e-6, "bytes_per_s": 24e9},
            ],
        },
        8,
    ),
    "dgx-h100": (
        {
            "device": {
                "type": "cuda",
                "memory_bytes": 80e9,
                "flops_per_s": {"float64": 34e12, "float32": 494e12, "bfloat16": 989e12, "float16": 989e12},
                "memory_bytes_per_s": 3.35e12,
                "launch_s": 5e-6,
                "reserve_bytes": 4 * _GIB,
            },
            "links": [
                {"devices": 8, "latency_s": 6e-6, "bytes_per_s": 360e9},
                {"devices": 16, "latency_s": 15e-6, "bytes_per_s": 45e9},
            ],
        },
        8,
    ),
}
