"""Trace a model's training step to one joint forward and backward graph.

In: any `nn.Module` (real, on meta, fake, or holding DTensor handles) and one call's arguments.
Out: a `Graph` whose every end is labelled.  Next: `normalise.py`, which makes the op vocabulary small.

The model runs twice or so on fake tensors under a function mode that turns attention and random functions into single
ops and notes the user's line of every call. Nothing of the model is changed when this returns, also on failure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch, adapters, tree
from autopar.attributes import reading, settle_buffers, unchanged
from autopar.checks import without_tokens
from autopar.double import Double, widened
from autopar.dtypes import check_dtypes
from autopar.errors import AutoparError, CaptureError, InputError
from autopar.graph import Graph, Input
from autopar.kept import without_kept
from autopar.labels import label
from autopar.loss import call_loss
from autopar.normalise import normalise
from autopar.opaque_module import opaque
from autopar.precision import Precision, cast, with_reductions
from autopar.recompute import recompute
from autopar.refusals import check_changes, check_constants, check_parameters
from autopar.swap import Named, named_tensors, swapped
from autopar.tracing import Tracing, user_line
from autopar.uncollected import uncollected

__all__ = ["capture", "opaque"]


@dataclass
class Step:
    """The traced function: flat tensors in, the loss and every other tensor leaf out.

    `seen` is filled while it runs: the structure of the result, and what each of its leaves is.
    """

    model: nn.Module
    parameters_: tuple[Named, ...]
    buffers_: tuple[Named, ...]
    in_tree: tree.Tree
    leaves: list[Any]
    loss_fn: Callable[..., Any] | None
    double: bool
    precision: Precision
    seen: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        tensors, rng = list(flat[:-1]), flat[-1]
        low = self.precision
        named = (*self.parameters_, *self.buffers_)
        values, rest = tensors[: len(named)], iter(tensors[len(named) :])
        filled = [cast(next(rest), low.param) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree.unflatten(self.in_tree, filled)
        wide = Double() if self.double else nullcontext()  # type: ignore[no-untyped-call]
        with unchanged(self.model) as left, swapped(named, values), Tracing(self.model, rng), wide:
            with reading(self.model) as reads:
                out = self.model(*args, **kwargs)
            settle_buffers(self.buffers_, values[len(self.parameters_) :])
            loss = None if self.loss_fn is None else call_loss(self.loss_fn, out, args, kwargs)
        self.seen.update(
            reads=tuple(sorted(reads)), writes=left.writes, kept=[(name, old) for name, _, old in left.kept]
        )
        return [*self.results(out, loss), *(tensor.detach().clone() for _, tensor, _ in left.kept)]

    def results(self, out: Any, loss: Tensor | None) -> list[Tensor]:
        """The loss first, then the other tensor leaves; fresh tensors, so that none is a view of another."""
        leaves, out_tree = tree.flatten(out)
        leaves = [cast(leaf, self.precision.output) for leaf in leaves]
        check_leaves(leaves, tree.paths(out_tree, "output"))
        inside = loss_leaf(leaves) if loss is None else None
        loss = loss if inside is None else leaves[inside]
        results = [] if loss is None else [loss.clone()]
        kinds: list[tuple[str, Any]] = []
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                kinds.append(("constant", leaf))
            elif i == inside:
                kinds.append(("output", 0))
            else:
                kinds.append(("output", len(results)))
                results.append(leaf.clone() if loss is None else leaf.detach().clone())
        self.seen.update(out_tree=out_tree, out_leaves=tuple(kinds), loss=loss is not None)
        self.seen["names"] = ["loss"] * (loss is not None) + [
            path
            for i, (path, leaf) in enumerate(zip(tree.paths(out_tree, "output"), leaves, strict=True))
            if isinstance(leaf, Tensor) and i != inside
        ]
        return results


def loss_leaf(leaves: Sequence[Any]) -> int | None:
    """Position of the first scalar floating-point leaf that needs a gradient."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point() and leaf.requires_grad:
            return i
    return None


def check_leaves(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Every leaf of a result is a tensor or a plain constant."""
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, (Tensor, *tree.PLAIN)):
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise CaptureError(
                f"{path} is a {kind}, a type that cannot be rebuilt from tensors\n"
                "  try: return tensors, tuples, lists, dicts or dataclasses (transformers: use_cache=False), or "
                "register the type as a pytree node of torch"
            )


@uncollected()
def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    double: bool = False,
    precision: Precision | None = None,
) -> Graph:
    """The joint graph of one call `model(*args, **kwargs)` and its backward.

    loss_fn   a function or a module: `loss_fn(output)`, or `loss_fn(output, *args, **kwargs)` if it needs more than one
              argument; without it the loss is the first scalar floating-point leaf of the output
    double    every float32 in the graph becomes float64 (for comparisons)
    precision dtypes of computing and reducing, where they are not the model's own

    Raises `CaptureError` where the step is not one graph.
    """
    parameters, buffers = named_tensors(model)
    check_parameters(parameters)
    leaves, in_tree = tree.flatten((tuple(args), dict(kwargs or {})))
    for path, leaf in zip(argument_paths(in_tree), leaves, strict=True):
        if problem := tree.foreign_argument(leaf, path):
            raise CaptureError(problem)
    low = precision or Precision()
    step = Step(model, parameters, buffers, in_tree, leaves, loss_fn, double, low)
    step.seen["buffers"] = range(len(parameters), len(parameters) + len(buffers))
    sources = [*(p.tensor for p in parameters), *(b.tensor for b in buffers)]
    sources += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    mode = _torch.fake_mode()
    with ExitStack() as stack:
        stack.enter_context(adapters.packed_sequences(model, args, kwargs or {}))
        stack.enter_context(adapters.expert_layers())
        stack.enter_context(_torch.checkpoints_marked())
        stack.enter_context(torch.enable_grad())
        wide = widened if double else (lambda dtype: dtype)
        dtypes = [low.computed(p.tensor.dtype) for p in parameters] + [t.dtype for t in sources[len(parameters) :]]
        fakes = tuple(_torch.fake_like(mode, t, wide(d)) for t, d in zip(sources, dtypes, strict=True))
        rng = _torch.fake_like(mode, torch.zeros(2, dtype=torch.int64))
        joint = without_kept(traced(step, (*fakes, rng)), step.seen)
    check_constants(joint, parameters)
    inputs = described_inputs(parameters, buffers, leaves, in_tree)
    check_changes(joint, inputs)
    graph = check_dtypes(normalise(label(joint, inputs, step.seen, in_tree, leaves), mode))
    graph = recompute(graph)
    stored = [(p.names[0], p.tensor.dtype) for p in parameters]
    return graph if precision is None else with_reductions(graph, precision, stored)


def traced(step: Step, fakes: tuple[Tensor, ...]) -> _torch.Joint:
    """The joint graph, or one `CaptureError` that names the user's line."""
    try:
        return without_tokens(_torch.joint_graph(step, fakes, adapters.decompositions()))
    except AutoparError:
        raise
    except _torch.DataDependentShape as error:
        raise CaptureError(
            "data-dependent shape: the values of a tensor decide how large a result is, which one graph cannot express"
            f"{where(error)}\n"
            "  try: keep the shape and mask, like torch.where(mask, y, 0).sum() / mask.sum() for y[mask].mean(), or "
            "autopar.opaque(module) to run that submodule whole on every device"
        ) from error
    except _torch.DataDependent as error:
        raise CaptureError(
            "data-dependent branch: the values of a tensor decide what runs next, which one graph cannot express"
            f"{where(error)}\n"
            "  try: the tensor itself in place of a number (.item(), float(), int()); for a branch torch.where or "
            "torch.cond, autopar.opaque(module) to run that submodule whole on every device, or a static value"
        ) from error
    except TypeError as error:
        if problem := misfit(step):
            raise InputError(problem) from error
        raise
    except RuntimeError as error:
        raise CaptureError(
            f"forward does not run on tensors that have shapes and no values: {error}{where(error)}\n"
            "  try: the same call without autopar; if it runs, autopar.opaque(module) for the submodule of that line"
        ) from error


def misfit(step: Step) -> str:
    """How the call does not fit the signature of the model's forward; nothing where it does."""
    args, kwargs = tree.unflatten(step.in_tree, step.leaves)
    signature = inspect.signature(step.model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        way = "call the module, and give example_inputs, as the model is called on one device"
        if step.loss_fn is not None:
            way = (
                "loss_fn gets the arguments that forward takes and no others; for a target beside them, a module of "
                "yours around the model, and no loss_fn:\n"
                "    def forward(self, x, y): return self.loss(self.model(x), y)"
            )
        name = f"{type(step.model).__name__}.forward({', '.join(signature.parameters)})"
        return f"{name} does not take this call: {error}\n  try: {way}"
    return ""


def where(error: BaseException) -> str:
    """The user's line; nothing in backward, which has none."""
    line = user_line(error.__traceback__)
    return f"\n  from {line}" if line else ""


def described_inputs(
    parameters: Sequence[Named], buffers: Sequence[Named], leaves: Sequence[Any], in_tree: tree.Tree
) -> tuple[Input, ...]:
    """An `Input` for every argument of the traced function; node names come later."""
    out = [Input("", "parameter", p.names[0], p.names, p.tensor.requires_grad) for p in parameters]
    out += [Input("", "buffer", b.names[0], b.names) for b in buffers]
    pairs = zip(argument_paths(in_tree), leaves, strict=True)
    out += [Input("", "input", name) for name, leaf in pairs if isinstance(leaf, Tensor)]
    return (*out, Input("", "rng", "rng"))


def argument_paths(in_tree: tree.Tree) -> list[str]:
    """Readable places of the leaves of (args, kwargs): `args[0]`, `kwargs['labels']`."""
    args, kwargs = in_tree.children
    return [*tree.paths(args, "args"), *tree.paths(kwargs, "kwargs")]
