"""autopar: `parallelize(model, cluster)` makes a single-device PyTorch model train on a cluster.

Names below are imported when first used, so that a process which needs one room does not load the others (the
reference of the parity harness loads neither capture nor planner). Read next: `api.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.errors import (
    AutoparError,
    CaptureError,
    ClusterError,
    InputError,
    NoPlan,
    PlanError,
    RuleError,
    SolverError,
    UnsafeFileError,
    UnsupportedError,
)
from autopar.plan import Plan

if TYPE_CHECKING:
    from autopar import strategies
    from autopar.api import parallelize
    from autopar.cluster import ClusterSpec
    from autopar.opaque_module import opaque
    from autopar.precision import Precision
    from autopar.rules.own import rule
    from autopar.runtime.deferred import deferred
    from autopar.runtime.local import Local
    from autopar.runtime.materialise import initialise
    from autopar.runtime.module import ParallelModule

__version__ = "0.1.0"

LAZY = {
    "ClusterSpec": "autopar.cluster",
    "Local": "autopar.runtime.local",
    "ParallelModule": "autopar.runtime.module",
    "Precision": "autopar.precision",
    "deferred": "autopar.runtime.deferred",
    "initialise": "autopar.runtime.materialise",
    "opaque": "autopar.opaque_module",
    "parallelize": "autopar.api",
    "rule": "autopar.rules.own",
}

__all__ = [
    "AutoparError",
    "CaptureError",
    "ClusterError",
    "ClusterSpec",
    "InputError",
    "Local",
    "NoPlan",
    "ParallelModule",
    "Plan",
    "PlanError",
    "Precision",
    "RuleError",
    "SolverError",
    "UnsafeFileError",
    "UnsupportedError",
    "deferred",
    "initialise",
    "opaque",
    "parallelize",
    "plan",
    "rule",
    "strategies",
]


def plan(*args: Any, **kwargs: Any) -> Plan:
    """Plan a model for a cluster with no process group and no devices; see `autopar.api.plan`."""
    made: Plan = import_module("autopar.api").plan(*args, **kwargs)
    return made


def __getattr__(name: str) -> Any:
    if name == "strategies":
        return import_module("autopar.strategies")
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
