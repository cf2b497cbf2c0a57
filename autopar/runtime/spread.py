"""Parameters put where the plan stores them.

In: a module with plain parameters (real or on meta), or with provisional handles; a plan.  Out: the same module with
DTensors of one mesh.  Next: `materialise.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch import local_of
from autopar.errors import PlanError
from autopar.layout import Layout, Mesh
from autopar.placements import contiguous_stride, distribute, piece, storable
from autopar.plan import Plan
from autopar.runtime.materialise import empty, materialise
from autopar.runtime.parameters import Slots, handle
from autopar.runtime.step import Place
from autopar.runtime.world import World, device_mesh


def spread_provisionally(parameters: tuple[Slots, ...], buffers: tuple[Slots, ...], world: World) -> None:
    """Make every parameter a DTensor before anything is planned, so that optimizers can hold it already.

    It is whole on every rank (on meta, where the model is) and on a mesh of one axis; `spread` swaps it in place.
    """
    mesh = device_mesh(Mesh(("ranks",), (world.size,)), world.device.type)
    for slot in parameters:
        old = slot.get()
        with torch.no_grad():
            local = old.detach() if empty(old) else old.detach().to(world.device)
            shape = old.shape
            new = DTensor.from_local(
                local.contiguous(), mesh, [Replicate()], run_check=False, shape=shape, stride=contiguous_stride(shape)
            )
        slot.hand_over(handle(old, new))
    for slot in buffers:
        if not empty(slot.get()):
            slot.put(slot.get().to(world.device))


def layout_of(slot: Slots, plan: Plan) -> Layout:
    """The stored layout of a parameter; one that the graph does not know is whole."""
    shape = tuple(slot.get().shape)
    found = next((plan.parameters[name] for name in slot.names if name in plan.parameters), None)
    if found is None:
        return Layout.whole(tuple((size,) if size != 1 else () for size in shape))
    if found.stored.shape != shape:
        raise PlanError(f"the plan stores {slot.name} as {found.stored}, but the model's has shape {shape}")
    if not storable(found.stored, plan.mesh):
        raise PlanError(
            f"the plan stores {slot.name} as {found.stored} on {plan.mesh}, which DTensor cannot express "
            "or which leaves a rank without a row"
        )
    return found.stored


def spread(
    model: nn.Module, parameters: tuple[Slots, ...], buffers: tuple[Slots, ...], plan: Plan, place: Place, seed: int
) -> None:
    """Put this rank's piece of every parameter in its place, whole buffers beside them."""
    layouts = {slot.name: layout_of(slot, plan) for slot in parameters}
    pieces: dict[str, Tensor] = {}
    if any(empty(slot.get()) for slot in (*parameters, *buffers)):
        pieces = materialise(model, parameters, buffers, layouts, place.mesh, place.coordinate, seed)
    for slot in parameters:
        old, layout = slot.get(), layouts[slot.name]
        local = pieces.pop(slot.name, None)
        if local is None:
            source = local_of(old) if isinstance(old, DTensor) else old
            local = piece(source.detach(), layout, place.mesh, dict(place.coordinate)).to(place.device)
            local = local.clone(memory_format=torch.contiguous_format) if local.numel() < source.numel() else local
        new = handle(old, distribute(local, layout, place.mesh, place.device_mesh))
        del local
        if isinstance(old, DTensor):
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        else:
            slot.hand_over(new)
    for slot in buffers:
        slot.put(slot.get().to(place.device))
