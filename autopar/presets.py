"""Clusters that are known by name, as the plain data of a cluster file.

In: nothing.  Out: `PRESETS`.  Next: `cluster.py`.
"""

from __future__ import annotations

from typing import Any

Preset = tuple[dict[str, Any], int]  # a cluster, and devices a host

_GIB = 2.0**30
_DEVICE = {"type": "cuda", "reserve_bytes": 4 * _GIB}


def _peaks(float64: float, float32: float, half: float) -> dict[str, float]:
    return {"float64": float64, "float32": float32, "bfloat16": half, "float16": half}


# Data sheets, dense (no sparsity); float32 means TF32, as tensor cores compute it.
_V100 = {
    **_DEVICE,
    "memory_bytes": 32e9,
    "flops_per_s": {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12},
    "memory_bytes_per_s": 0.9e12,
    "launch_s": 6e-6,
}
_A100_80 = {
    **_DEVICE,
    "memory_bytes": 80e9,
    "flops_per_s": _peaks(9.7e12, 156e12, 312e12),
    "memory_bytes_per_s": 2.0e12,
    "launch_s": 6e-6,
}
_A100_40 = {**_A100_80, "memory_bytes": 40e9, "memory_bytes_per_s": 1.555e12}
_H100 = {
    **_DEVICE,
    "memory_bytes": 80e9,
    "flops_per_s": _peaks(34e12, 494e12, 989e12),
    "memory_bytes_per_s": 3.35e12,
    "launch_s": 5e-6,
}
_H200 = {**_H100, "memory_bytes": 141e9, "memory_bytes_per_s": 4.8e12}
_GB200 = {
    **_DEVICE,
    "memory_bytes": 186e9,
    "flops_per_s": _peaks(40e12, 1250e12, 2500e12),
    "memory_bytes_per_s": 8e12,
    "launch_s": 5e-6,
}
_L4 = {
    **_DEVICE,
    "memory_bytes": 24e9,
    "flops_per_s": _peaks(0.47e12, 60e12, 121e12),
    "memory_bytes_per_s": 0.3e12,
    "launch_s": 6e-6,
    "reserve_bytes": 2 * _GIB,
}
_RTX3090 = {
    **_DEVICE,
    "memory_bytes": 24e9,
    "flops_per_s": _peaks(0.556e12, 35.6e12, 71e12),
    "memory_bytes_per_s": 0.936e12,
    "launch_s": 6e-6,
    "reserve_bytes": 2 * _GIB,
}
_CPU = {
    "type": "cpu",
    "memory_bytes": 4 * _GIB,
    "flops_per_s": {"float32": 40e9, "float64": 20e9, "bfloat16": 20e9, "float16": 10e9},
    "memory_bytes_per_s": 8e9,
    "launch_s": 5e-6,
    "reserve_bytes": 0.25 * _GIB,
}


def _link(devices: int, latency_s: float, bytes_per_s: float, **more: Any) -> dict[str, Any]:
    return {"devices": devices, "latency_s": latency_s, "bytes_per_s": bytes_per_s, **more}


# Start and latency of NVLink: fitted, with the bandwidth, to the all-reduce curve of 2 to 8 A100 from 1 MiB to 1 GiB in
# VIA-Research/vTrain (benchmarks/published_collectives.py compares); no such curve of H100 and later is published.
# Latency between hosts: NCCL src/graph/tuning.cc, network, LL128. The 24 and 48 GB/s of a 200 and a 400 Gbit/s card:
# NVIDIA/nccl-tests issues 119 and 290; 12 of a 100 Gbit/s one alike.
_START = {"start_s": 40e-6}
_NVLINK_S, _PCIE_S, _NET_S = 2e-6, 6e-6, 4e-6
_NVLINK2 = _link(16, _NVLINK_S, 134e9, **_START)  # 8 V100 with six links each in vTrain's curve: 134.5 GB/s
_NVLINK3 = _link(8, _NVLINK_S, 220e9, **_START)
# 370 GB/s of a ring; 275 GB/s of a device where the switch adds (480 of bus bandwidth): NVIDIA/nccl-tests issue 212.
_NVLINK4 = _link(8, _NVLINK_S, 370e9, in_network_bytes_per_s=280e9, **_START)
# An all-reduce of 72 at 835 to 839 GB/s of bus bandwidth: coreweave/nccl-tests pull request 43. Ring: twice NVLink 4.
_NVLINK5 = _link(72, _NVLINK_S, 740e9, in_network_bytes_per_s=430e9, **_START)
# Through the host's memory: no more than half of 16 lanes of PCIe 4, an estimate.
_PCIE4 = _link(8, _PCIE_S, 11e9, **_START)


def _net(bytes_per_s: float, shared_by: int, latency_s: float = _NET_S) -> dict[str, Any]:
    return _link(2, latency_s, bytes_per_s, shared_by=shared_by, **_START)


def _preset(device: dict[str, Any], library: str, inner: dict[str, Any], outer: dict[str, Any]) -> Preset:
    hosts = {**outer, "devices": outer["devices"] * inner["devices"]}
    return {"device": device, "library": library, "links": [inner, hosts]}, inner["devices"]


_EFA_S = 15e-6  # of AWS's network, an estimate
PRESETS: dict[str, Preset] = {
    # One core a process; links inside the host and over 10 Gbit/s Ethernet.
    "cpu-gloo": _preset(_CPU, "gloo", _link(64, 40e-6, 1.2e9), _link(2, 100e-6, 0.6e9)),
    "dgx-2": _preset(_V100, "nccl", _NVLINK2, _net(12e9, 2)),  # 8 cards of 100 Gbit/s for 16 devices
    "dgx-a100-40": _preset(_A100_40, "nccl", _NVLINK3, _net(24e9, 1)),  # 8 cards of 200 Gbit/s
    "dgx-a100-80": _preset(_A100_80, "nccl", _NVLINK3, _net(24e9, 1)),
    "dgx-h100": _preset(_H100, "nccl", _NVLINK4, _net(48e9, 1)),  # 8 cards of 400 Gbit/s
    "dgx-h200": _preset(_H200, "nccl", _NVLINK4, _net(48e9, 1)),
    "gb200-nvl72": _preset(_GB200, "nccl", _NVLINK5, _net(48e9, 1)),  # "host": the rack that NVLink joins
    "p4d": _preset(_A100_40, "nccl", _NVLINK3, _net(12e9, 2, _EFA_S)),  # 4 cards of 100 Gbit/s
    "p5": _preset(_H100, "nccl", _NVLINK4, _net(48e9, 1, _EFA_S)),  # 32 cards of 100 Gbit/s, 4 a device
    "l4-pcie": _preset(_L4, "nccl", _PCIE4, _net(12e9, 8)),  # one card of 100 Gbit/s a host
    "rtx3090-pcie": _preset(_RTX3090, "nccl", _PCIE4, _net(1.2e9, 8)),  # one card of 10 Gbit/s a host
}
