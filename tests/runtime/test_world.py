"""Meshes and their process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.layout import Mesh
from autopar.runtime.world import device_mesh
from autopar.verify.pool import Pool

MESH = Mesh(("data", "model"), (2, 2))


def made_twice() -> tuple[bool, int]:
    """Whether a mesh of the same axes is the same one, and how many process groups the second one added."""
    first = device_mesh(MESH, "cpu")
    before = dist.get_pg_count()
    return device_mesh(Mesh(MESH.names, MESH.sizes), "cpu") is first, dist.get_pg_count() - before


def sums() -> list[float]:
    """What all-reduces of the rank along both axes give."""
    mesh, out = device_mesh(MESH, "cpu"), []
    for axis in MESH.names:
        value = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(value, group=mesh.get_group(axis))
        out.append(value.item())
    return out


def test_modules_share_a_mesh_and_its_groups(ranks: Pool) -> None:
    assert ranks.run(made_twice) == [(True, 0)] * 4


def left_and_entered_again() -> tuple[int, list[float]]:
    """A mesh in a second default group of the same process: its size, and the sums in the group that it can see."""
    device_mesh(MESH, "cpu")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mesh = device_mesh(Mesh(("data",), (1,)), "cpu")
    value = torch.tensor([7.0])
    dist.all_reduce(value, group=mesh.get_group("data"))
    return mesh.size(), value.tolist()


def test_sums_run_along_the_axes(ranks: Pool) -> None:
    assert ranks.run(sums) == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


@pytest.mark.ranks
def test_a_new_default_group_gets_new_meshes() -> None:
    with Pool(4, timeout=60) as pool:
        assert pool.run(left_and_entered_again) == [(1, [7.0])] * 4
