"""Words of the command line as values: strategies, bytes, clusters.

In: text.  Out: values.  Next: `commands.py`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.errors import InputError

UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def read_bytes(text: str) -> int:
    """`8GiB`, `500MB` or `123456` as bytes."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise InputError(f"{text!r} is no number of bytes; write one like 8GiB, 500MB or 123456")
    return int(float(match[1]) * UNITS[(match[2] or "").lower()])


def read_strategy(text: str) -> Any:
    """`zero(3)`, or a product like `ddp(2) * megatron(2, sp=True)`, as a strategy; nothing is evaluated."""
    try:
        return _strategy(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise InputError(f"{text!r} is no strategy: {error}; write one like zero(3) or ddp(2) * tensor(2)") from error


def _strategy(node: ast.expr) -> Any:
    from autopar import strategies

    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _strategy(node.left) * _strategy(node.right)
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise ValueError("only names, calls and products are understood")
    make = getattr(strategies, name.id, None) if name.id in strategies.__all__ else None
    if make is None or isinstance(make, type):
        raise ValueError(f"there is no strategy {name.id}")
    args = [ast.literal_eval(a) for a in node.args] if isinstance(node, ast.Call) else []
    if isinstance(node, ast.Call) and any(k.arg is None for k in node.keywords):
        raise ValueError("keywords are written out")
    keywords = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg} if isinstance(node, ast.Call) else {}
    return make(*args, **keywords)


def read_cluster(name: str, devices: int | None, hosts: int | None) -> ClusterSpec:
    """A cluster file, the name of a preset, or "detect"; `devices` and `hosts` size it."""
    if name == "detect":
        return ClusterSpec.detect(devices)
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        cluster = ClusterSpec.load(name)
        return cluster if devices is None else cluster.with_devices(devices)
    return ClusterSpec.preset(name, devices=devices, hosts=hosts)
