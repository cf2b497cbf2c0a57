"""The module that `parallelize` returns: the user's own, with parameters spread and programs inside.

In: a model; a graph and a plan, or a compiler that makes them.  Out: `ParallelModule`.  Next: `engine.py`.

It is an instance of the model's class too and shares its attributes and submodules, so `isinstance`, `model.config`,
methods and names go on working; only `forward` is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import settle_pending_items
from autopar.errors import UnsupportedError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.runtime import checkpoint, norms
from autopar.runtime.compiler import Compiler, Fixed
from autopar.runtime.engine import Engine
from autopar.runtime.parameters import check_bare, check_equal, slots
from autopar.runtime.spread import spread_provisionally
from autopar.runtime.watch import watch_optimizers


class ParallelModule(nn.Module):
    """A model that trains on the cluster it was planned for. Made by `autopar.parallelize`."""

    _autopar_original: ClassVar[type[nn.Module]]  # the model's own class
    _autopar: Engine

    def __new__(cls, model: nn.Module, *_: Any, **__: Any) -> ParallelModule:
        if isinstance(model, ParallelModule):
            raise UnsupportedError("this module is a ParallelModule already")
        refuse_taken_names(model)
        made: ParallelModule = object.__new__(both(cls, type(model)))
        return made

    def __init__(
        self,
        model: nn.Module,
        graph: Graph | None = None,
        plan: Plan | None = None,
        *,
        compiler: Compiler | None = None,
        seed: int = 0,
    ) -> None:
        object.__setattr__(self, "__dict__", model.__dict__)
        settle_pending_items()
        compiler = compiler or Fixed(seed)
        world = compiler.world()
        engine = Engine(world, compiler, slots(model), slots(model, "_buffers"))
        object.__setattr__(self, "_autopar", engine)
        with world.agreeing("comparing the parameters of all ranks"):
            check_bare(engine.parameters)
            check_equal((*engine.parameters, *engine.buffers), world)
        watch_optimizers(engine)
        if graph is not None and plan is not None:
            engine.adopt(self, graph, plan)
        else:
            spread_provisionally(engine.parameters, engine.buffers, world)
            engine.watch(self)

    # ---- what a user reads and sets ----

    @property
    def plan(self) -> Plan | None:
        """What was decided; None before the first call if there were no example inputs."""
        return self._autopar.plan

    @property
    def device_mesh(self) -> DeviceMesh:
        """The one mesh that every parameter is placed on."""
        return self._autopar.settled().device_mesh

    @property
    def rng_step(self) -> int:
        """Training forwards so far; with the seed it determines every random number."""
        return self._autopar.rng_step

    @rng_step.setter
    def rng_step(self, step: int) -> None:
        self._autopar.rng_step = step

    @property
    def check_inputs(self) -> bool | None:
        """Compare the values of inputs across ranks: None in the first three calls, True always, False never."""
        return self._autopar.check_inputs

    @check_inputs.setter
    def check_inputs(self, value: bool | None) -> None:
        self._autopar.check_inputs = value

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(ParallelModule, name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def program_text(self) -> str:
        """Every program of this module as text."""
        parts = []
        for number, step in enumerate(self._autopar.programs.values()):
            for name in ("refresh", "forward", "backward"):
                parts.append(f"# program {number}, {name}\n{getattr(step.program, name)}")
        return "\n\n".join(parts)

    def prepare(self, *args: Any, **kwargs: Any) -> ParallelModule:
        """Plan and emit the program for a call like this one, without running it."""
        self._autopar.prepare(self, args, kwargs)
        return self

    # ---- norms and checkpoints ----

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scale all gradients so that their joint norm is at most `max_norm`; the norm before, as a plain number."""
        return norms.clip(list(self.parameters()), max_norm, norm_type, error_if_nonfinite)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module` does, from whole tensors or DTensors of any layout."""
        if assign:
            raise UnsupportedError("load_state_dict(assign=True) would replace the parameters that the programs use")
        self._autopar.parameters_changed()
        placed = checkpoint.in_layouts(self.state_dict(), state_dict, self._autopar.piece_for)
        return super().load_state_dict(placed, strict=strict)

    def full_state_dict(self) -> dict[str, Tensor]:
        """`state_dict()` with whole plain tensors, for a file that the single-device model loads; on every rank."""
        return {name: checkpoint.full(value) for name, value in self.state_dict().items()}

    def __deepcopy__(self, memo: Any) -> Any:
        raise UnsupportedError(
            "a ParallelModule cannot be copied; load its full_state_dict() into another model\n"
            "  try: for an average of its weights (AveragedModel) the loop in docs/training.md, which needs no copy"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a ParallelModule cannot be pickled; save its state_dict() or full_state_dict()")


def refuse_taken_names(model: nn.Module) -> None:
    """A model that uses one of the names that `ParallelModule` adds would be hidden behind it."""
    ours = {name for name in vars(ParallelModule) if not name.startswith("__") and not hasattr(nn.Module, name)}
    theirs = {*vars(model), *vars(model)["_modules"], *vars(model)["_parameters"], *vars(model)["_buffers"]}
    taken = sorted(name for name in ours if name in theirs or hasattr(type(model), name))
    if taken:
        raise UnsupportedError(
            f"{type(model).__name__} has attributes that a ParallelModule needs for itself: {', '.join(taken)}\n"
            "  try: rename them, or wrap the model in a module of yours"
        )


_CLASSES: dict[type[nn.Module], type] = {}  # registry: a model's class -> the class that is both


def both(base: type, original: type[nn.Module]) -> type:
    """The class that does what `ParallelModule` does, over what the user's class is."""
    if original not in _CLASSES:

        @wraps(original.forward)
        def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
            return self._autopar.forward(self, args, kwargs)

        body = {"forward": forward, "_autopar_original": original, "__module__": original.__module__}
        _CLASSES[original] = type(f"Parallel{original.__name__}", (base, original), body)
    return _CLASSES[original]
