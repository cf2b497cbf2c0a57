"""Every private name of torch that autopar uses, each behind a small function.

In: torch.  Out: functions with a meaning of their own, so that a change in torch is mended here alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.fx.traceback
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch._decomp import get_decompositions
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import descriptors
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DispatchMode = TorchDispatchMode  # a context in which every op is seen before it runs


def strided_shard(dim: int, split: int) -> Placement:
    """DTensor's placement that takes a dim as `split` rows and cuts each of them."""
    return _StridedShard(dim, split_factor=split)


# ---- tracing (capture) ----------------------------------------------------------------------------------------------


def registered_flatten(value: Any) -> tuple[list[Any], Any] | None:
    """(children, context) of a value whose type the user registered with torch's pytree; None for others."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    return None if node is None else node.flatten_fn(value)


def registered_unflatten(kind: type, children: list[Any], context: Any) -> Any:
    """A value of a registered type from its children."""
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)


def fake_mode() -> FakeTensorMode:
    """Tensors without data, of static shapes; real constants met on the way are allowed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def compiling() -> Iterator[None]:
    """The *compiling* flag of `torch.compiler`, not the exporting one, and no stack traces collected by torch."""
    flag, quiet = torch.compiler._is_compiling_flag, torch.fx.config.do_not_emit_stack_traces
    torch.compiler._is_compiling_flag, torch.fx.config.do_not_emit_stack_traces = True, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.fx.config.do_not_emit_stack_traces = flag, quiet


@dataclass(frozen=True)
class Joint:
    """A traced joint graph: for every placeholder and result what it is.

    inputs    ("argument", index), ("tangent", index of the output), or ("changed", index of the argument) for the
              gradient of an argument that is differentiable and changed in place
    results   ("output", index), ("gradient", index of the argument) or ("mutation", index of the argument)
    either    ("token", index) for what keeps effects in order; gone after `checks.without_tokens`
    """

    graph: torch.fx.Graph
    attributes: dict[str, Any]
    inputs: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]


class Shell(torch.nn.Module):
    """A module without parameters around a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def joint_graph(step: Callable[..., Any], args: tuple[Any, ...], decompositions: dict[Any, Any]) -> Joint:
    """Trace `step(*args)`, a function of flat fake tensors, and its backward."""
    with ExitStack() as stack:
        stack.enter_context(compiling())
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        made = aot_autograd.aot_export_joint_with_descriptors(
            stack, Shell(step), args, decompositions=decompositions, _disable_torch_fn_metadata_mode=True
        )
        module = made.graph_module
    graph = module.graph
    inputs = tuple(_described(n.meta["desc"]) for n in graph.nodes if n.op == "placeholder")
    (output,) = [n for n in graph.nodes if n.op == "output"]
    results = tuple(_described(d) for d in output.meta["desc"])
    attributes = {n.target: getattr(module, n.target) for n in graph.nodes if n.op == "get_attr"}
    return Joint(graph, attributes, inputs, results)


def _described(desc: Any) -> tuple[str, int]:
    match desc:
        case None:
            return "nothing", 0
        case descriptors.PlainAOTInput(idx=index):
            return "argument", index
        case descriptors.ForwardTokenAOTInput(idx=index) | descriptors.BackwardTokenAOTInput(idx=index):
            return "token", index
        case descriptors.ForwardTokenAOTOutput(idx=index) | descriptors.BackwardTokenAOTOutput(idx=index):
            return "token", index
        case descriptors.TangentAOTInput(output=descriptors.PlainAOTOutput(idx=index)):
            return "tangent", index
        case descriptors.TangentAOTInput(
            output=descriptors.InputMutationAOTOutput(mutated_input=descriptors.PlainAOTInput(idx=index))
        ):
            return "changed", index
        case descriptors.PlainAOTOutput(idx=index):
            return "output", index
        case descriptors.GradAOTOutput(grad_of=descriptors.PlainAOTInput(idx=index)):
            return "gradient", index
        case descriptors.InputMutationAOTOutput(mutated_input=descriptors.PlainAOTInput(idx=index)):
            return "mutation", index
    raise AssertionError(f"tracing gave an input or output of an unexpected kind: {desc}")


def decompositions(names: Iterable[str]) -> dict[Any, Any]:
    """torch's own decompositions of the named ATen ops, all overloads."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return get_decompositions(packets)


@contextmanager
def checkpoints_marked() -> Iterator[None]:
    """Inside, `torch.utils.checkpoint.checkpoint(f, ...)` calls f and marks its nodes with the number of the call."""
    here: Any = torch.utils.checkpoint
    saved = here.CheckpointFunction, here._checkpoint_without_reentrant_generator
    here.CheckpointFunction, here._checkpoint_without_reentrant_generator = _Direct, _marked
    try:
        yield
    finally:
        here.CheckpointFunction, here._checkpoint_without_reentrant_generator = saved


class _Direct:
    """Stands in for the reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        with torch.fx.traceback.annotate({"region": next(REGIONS)}):
            return function(*args)


REGIONS = itertools.count()


def _marked(*_: Any, **__: Any) -> Iterator[None]:
    with torch.fx.traceback.annotate({"region": next(REGIONS)}):
        yield


def random_op(target: Any) -> bool:
    """An op that draws from torch's own generator."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def flat_weights(module: torch.nn.Module) -> list[Any]:
    """The list in which recurrent modules keep their weights a second time."""
    return module._flat_weights if isinstance(module, torch.nn.RNNBase) else []


DataDependentShape = DynamicOutputShapeException
DataDependent = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, nothing is traced, faked or replaced: tensors made there are real."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def backward_keeps_graph() -> bool:
    """Whether the backward pass now running was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def settle_pending_items() -> None:
    """Make `DTensor.item()` reduce first; torch returns the rank's own term of a pending sum or maximum.

    `torch.nn.utils.clip_grad_norm_(..., norm_type=inf)` returns such a tensor. A scalar DTensor can also be formatted
    as a number (`f"{norm:.3f}"`), as any other scalar tensor can. Fused optimizers work on the pieces: DTensor knows
    Adam alone, and makes a spec for the number of steps of every parameter at every step, which takes as long again.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _settled_item)
    for op in (getattr(torch.ops.aten, name) for name in FUSED):
        for overload in op.overloads():
            handlers.setdefault(getattr(op, overload), _piece_by_piece)
    if "__format__" not in vars(DTensor):
        DTensor.__format__ = _formatted  # type: ignore[method-assign, assignment]


FUSED = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")


def _piece_by_piece(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An update of lists in place; what belongs to a parameter must lie as it does, else DTensor has its own way."""
    if all(_alike(args[0], entry) for entry in args[1:] if isinstance(entry, (list, tuple))):
        return op(*map(_pieces, args), **{name: _pieces(value) for name, value in kwargs.items()})
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    own = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = own


def _alike(parameters: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether each of `others` is placed as its parameter, or all are plain numbers, as those of steps are."""
    if not any(isinstance(x, DTensor) for x in others):
        return not any(x.dim() for x in others)
    pairs = zip(parameters, others, strict=True)
    return all(
        isinstance(p, DTensor)
        and isinstance(x, DTensor)
        and p.device_mesh is x.device_mesh
        and p.placements == x.placements
        for p, x in pairs
    )


def _pieces(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [*map(_pieces, value)]
    return value._local_tensor if isinstance(value, DTensor) else value


def _formatted(tensor: DTensor, spec: str) -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 and spec else object.__format__(tensor, spec)


def _settled_item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = args[0]
    if any(p.is_partial() for p in value.placements):
        value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return op(value._local_tensor)


# ---- fused attention kernels ----------------------------------------------------------------------------------------


def flash_forward_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, logsumexp [b, h, q]) of the CPU's flash attention."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = op(q, k, v, 0.0, causal, scale=scale)
    return out, logsumexp


def flash_backward_cpu(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of the CPU's flash attention."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = op(grad, q, k, v, out, logsumexp, 0.0, causal, scale=scale)
    return dq, dk, dv


def fake_like(mode: FakeTensorMode, source: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous fake tensor on the CPU with the shape, dtype (or another) and requires_grad of any tensor."""
    with mode:
        fake = torch.empty(tuple(source.shape), dtype=dtype or source.dtype, device="cpu")
    return fake.requires_grad_(source.requires_grad)


def local_of(tensor: DTensor) -> torch.Tensor:
    """The very tensor that a DTensor holds on this rank."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Mesh, placements, shape and dtype of a DTensor in one value."""
    return tensor._spec


def with_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """The DTensor of which `local` is this rank's piece; nothing is checked, so it costs little."""
    made: DTensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def boxed(graph: fx.Graph) -> fx.Graph:
    """Let a graph's module take its arguments as one list, which it empties, so that each dies after its last use."""
    graph.set_codegen(_BoxedCodeGen())
    return graph


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors have in common if they share memory; works on meta, and only while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def wrapper(cls: type, shape: Any, stride: Any, offset: int, dtype: torch.dtype) -> Any:
    """A tensor of class `cls` on the CPU that has no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, storage_offset=offset, dtype=dtype, device=torch.device("cpu")
    )


def without_torch_function(cls: type) -> type:
    """Let a tensor class be seen by `__torch_dispatch__` alone."""
    cls.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]
    return cls


def seeded(func: Any) -> bool:
    """Whether an op draws from the generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op writes to."""
    out = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            out += list(value) if isinstance(value, (tuple, list)) else [value]
    return out


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to in place."""
    return 0 if tensor.is_inference() else tensor._version


def plain_ops(*graphs: fx.Graph) -> bool:
    """Whether every op is torch's own or ours, and none an opaque module, which uses autograd inside."""
    ops = {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return all(
        op.namespace in ("aten", "prims", "_c10d_functional", "autopar") and "opaque" not in op._opname for op in ops
    )


def below_autograd(passed: bool) -> AbstractContextManager[Any]:
    """Where `passed`, ops are run without a look at autograd, which for a collective is a detour through Python.

    Not for ops that use autograd inside.
    """
    return torch._C._AutoDispatchBelowAutograd() if passed else nullcontext()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [leaf for leaf in pytree.tree_iter(value) if isinstance(leaf, torch.Tensor)]


def forget_meshes() -> None:
    """Empty the caches in which DTensor keeps device meshes, and with them groups, that are equal but gone."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def wrapper_storage(tensor: torch.Tensor) -> int:
    """What tells the storage of a DTensor's own shell: assigning to `.data` exchanges it, and nothing else does."""
    return int(tensor.untyped_storage()._cdata)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether something is registered to be called with the gradient of a tensor."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def serial_gloo() -> str:
    """Name of a backend that is gloo with one worker thread.

    Gloo's own default are two that take turns: while one starts a collective, the other clears away the last one, and
    rarely a process was seen to die of a small block of memory that both hold; see docs/limits.md.
    """
    name = "gloo_serial"
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _serial_gloo, devices=["cpu"])
    return name


def _serial_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = timeout, 1
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


# ---- ops ------------------------------------------------------------------------------------------------------------


def overload(op: Any) -> Any:
    """The one overload that a user means by an op: of `custom_op`, of `torch.ops`, or itself; None where it is none."""
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op.default if op.overloads() == ["default"] else None  # type: ignore[no-untyped-call]
    return op if isinstance(op, torch._ops.OpOverload) else None
