"""Copies that a step of a conversion makes beside its result, while it runs.

In: a `Step`, the mesh.  Out: elements.  Next: `memory.py`.

A collective moves one run of memory per device. A cut in a dim behind others is packed before or unpacked after, and
pieces that do not divide are padded; see `passes/lower.py`.
"""

from __future__ import annotations

import math

from autopar.layout import Layout, Mesh, Place, Step


def behind(layout: Layout, place: Place, mesh: Mesh) -> bool:
    """Whether a factor has others of more than one element in front of it."""
    first = dict.fromkeys(mesh.names, 0)
    sizes = [layout.span(p, mesh, first)[1] for p, _, _ in layout.places() if p < place]
    return math.prod(sizes) != 1


def copies_slice(step: Step, mesh: Mesh) -> bool:
    """Whether a slice is a copy: where it is not one run of memory."""
    place = step.after.where(step.axis)
    return isinstance(place, tuple) and behind(step.before, place, mesh)


def staging_elements(step: Step, mesh: Mesh) -> int:
    """Elements of the buffers that live only while the step runs, beside its operand and its result."""
    if step.kind not in ("reduce_scatter", "all_gather", "all_to_all"):
        return 0
    n = mesh.size(step.axis)
    before, after = step.before.local_numel(mesh), step.after.local_numel(mesh)
    left, landed = step.before.where(step.axis), step.after.where(step.axis)
    packed = unpacked = 0
    if isinstance(landed, tuple):
        uneven = step.before.span(landed, mesh, dict.fromkeys(mesh.names, 0))[1] % n != 0
        packed = before if uneven or behind(step.before, landed, mesh) else 0
    if isinstance(left, tuple):
        uneven = step.after.span(left, mesh, dict.fromkeys(mesh.names, 0))[1] % n != 0
        unpacked = after if uneven or behind(step.after, left, mesh) else 0
    return packed + unpacked
