"""The parameters of a module tree, and putting DTensors in their places.

In: a module tree.  Out: `slots`, `replace`, `hand_over`.  Next: `copies.py`.

A parameter may sit in several places under several names (tied weights); it is one `Slots`, and the new tensor goes
to all of them. Names are those of `named_parameters()`, so nothing is renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar._torch import has_gradient_hooks
from autopar.errors import InputError
from autopar.runtime.bits import checksum, combined
from autopar.runtime.deferred import Deferred, log_checksum
from autopar.runtime.world import World

LEFT = "_autopar_left"  # attribute of a parameter whose place a DTensor took: its name
OWN = ("_local_tensor", "_spec", "_is_param", "record", "tape", LEFT)  # attributes that are not of the user


@dataclass(frozen=True)
class Slots:
    """Where one parameter or buffer sits: every name it has, and every (module, attribute) that holds it."""

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    kind: str = "_parameters"

    @property
    def name(self) -> str:
        """The first name, by which graphs and plans know it."""
        return self.names[0]

    def get(self) -> Tensor:
        """The tensor that sits there now."""
        module, key = self.places[0]
        found = getattr(module, self.kind)[key]
        assert isinstance(found, Tensor)
        return found

    def put(self, tensor: Tensor) -> None:
        """Let another tensor sit there."""
        for module, key in self.places:
            getattr(module, self.kind)[key] = tensor

    def hand_over(self, new: nn.Parameter) -> None:
        """Let a DTensor take the place of a parameter, which is marked for those who hold it still."""
        setattr(self.get(), LEFT, self.name)
        self.put(new)


def slots(model: nn.Module, kind: str = "_parameters") -> tuple[Slots, ...]:
    """All parameters (`kind` "_buffers": buffers) in the order of their first names."""
    names: dict[int, list[str]] = {}
    places: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in getattr(module, kind).items():
            if tensor is not None:
                names.setdefault(id(tensor), []).append(f"{prefix}.{key}" if prefix else key)
                places.setdefault(id(tensor), {})[id(module), key] = (module, key)
    return tuple(Slots(tuple(names[i]), tuple(places[i].values()), kind) for i in names)


@contextmanager
def standing_in(all_slots: tuple[Slots, ...], tensors: tuple[Tensor, ...]) -> Iterator[None]:
    """Inside, other tensors sit in the places."""
    before = [slot.get() for slot in all_slots]
    try:
        for slot, tensor in zip(all_slots, tensors, strict=True):
            slot.put(tensor)
        yield
    finally:
        for slot, tensor in zip(all_slots, before, strict=True):
            slot.put(tensor)


def outline(parameter: Tensor) -> nn.Parameter:
    """A parameter of the same whole shape without numbers, to capture with."""
    with torch.no_grad():
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def handle(old: Tensor, new: Tensor) -> nn.Parameter:
    """`new` as the parameter that takes the place of `old`: what was noted on the old one stays noted."""
    parameter = nn.Parameter(new, requires_grad=old.requires_grad)
    for key, value in vars(old).items():
        if key not in OWN:
            setattr(parameter, key, value)
    return parameter


def check_bare(all_slots: tuple[Slots, ...]) -> None:
    """No parameter has a gradient or a hook already: they would be lost."""
    for slot in all_slots:
        old = slot.get()
        if old.grad is not None and bool(old.grad.any()):
            raise InputError(
                f"parameter {slot.name} has a gradient already, which the parallel module would not know\n"
                "  try: zero_grad() before parallelize, or the backward after it"
            )
        if has_gradient_hooks(old):
            raise InputError(
                f"parameter {slot.name} has hooks for its gradient, which would be lost\n"
                "  try: register them after parallelize"
            )


def check_equal(all_slots: tuple[Slots, ...], world: World) -> None:
    """Every rank must start from the same numbers; the error names the first parameter or buffer that differs."""
    if world.size == 1:
        return
    real = [s for s in all_slots if s.get().device.type != "meta"]
    sums = [log_checksum(t) if isinstance(t := s.get().detach(), Deferred) else checksum(t) for s in real]
    shapes = [checksum(torch.tensor([len(s.name), *s.get().shape])) for s in real]
    rows = world.gather(torch.tensor([len(real), combined(sums), combined(shapes)])).tolist()
    if all(row == rows[0] for row in rows):
        return
    if any(row[0] != rows[0][0] for row in rows):
        raise InputError(f"the ranks hold models with {[row[0] for row in rows]} parameters and buffers with numbers")
    table = world.gather(torch.tensor(shapes + sums)).tolist()
    for index in range(2 * len(real)):
        odd = next((r for r, row in enumerate(table) if row[index] != table[0][index]), None)
        if odd is not None:
            slot = real[index % len(real)]
            what = "parameter" if slot.kind == "_parameters" else "buffer"
            if index < len(real):
                told = world.gather_text(f"{slot.name} {list(slot.get().shape)}")
                raise InputError(
                    f"rank 0 has {what} {told[0]} where rank {odd} has {told[odd]}: their models differ in size\n"
                    "  try: the same sizes on all ranks"
                )
            raise InputError(
                f"{what} {slot.name} differs between rank 0 and rank {odd}\n"
                "  try: torch.manual_seed with one seed on all ranks before the model is made, or load one checkpoint"
            )
    raise AssertionError("checksums differ and no row of them does")
