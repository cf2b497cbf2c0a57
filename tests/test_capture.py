"""Capture: any module becomes one labelled graph that computes what the module computes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import CaptureError, InputError, UnsupportedError, opaque
from autopar.capture import capture
from autopar.models import awkward, gpt, llama, mlp
from tests.graphs import ops, run_eager, run_graph, worst

MODELS = {"mlp": mlp.tiny, "gpt": gpt.tiny, "llama": llama.tiny, **awkward.ALL}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODELS)
def test_graph_equals_eager_in_float64(name: str) -> None:
    model, args = MODELS[name]()
    graph = capture(model, args, double=True)
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) <= 1e-13


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_every_node_is_labelled(name: str) -> None:
    model, args = MODELS[name]()
    graph = capture(model, args)
    names = [node.name for node in graph.fx.nodes]
    assert len(set(names)) == len(names)
    for node in graph.fx.nodes:
        assert "cuda" not in str(node.kwargs)
        if node.op == "call_function":
            assert node.meta["phase"] in ("forward", "backward")
            assert node.meta["source"].startswith(f"{name}.py:"), node
            assert node.meta["module"] in dict(model.named_modules()), node
    assert names == [node.name for node in capture(model, args).fx.nodes]


def test_no_node_is_a_no_op_or_a_dense_mask() -> None:
    model, args = llama.tiny()
    found = set(ops(capture(model, args)))
    assert not found & {f"aten.{op}.default" for op in ("alias", "detach", "clone", "t", "view", "addmm", "mean")}
    assert "autopar.attention.default" in found and "autopar.attention_backward.default" in found


def test_the_model_is_left_as_it_was() -> None:
    model, args = gpt.tiny()
    before = dict(model.named_parameters(remove_duplicate=False))
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    capture(model, args)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(before[name] is after[name] for name in before) and before.keys() == after.keys()
    assert hooks == len(torch.nn.modules.module._global_forward_hooks)


def test_a_model_on_meta_gives_the_same_graph() -> None:
    model, args = gpt.tiny()
    real = capture(model, args)
    with torch.device("meta"):
        meta, _ = gpt.tiny()
    assert str(capture(meta, args).fx) == str(real.fx)


@dataclasses.dataclass
class Out:
    loss: Tensor | None
    logits: Tensor
    extra: Any = None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, *, ids: Tensor, labels: Tensor | None = None, flags: dict[str, Any]) -> Out:
        logits = self.a(ids) * flags["scale"]
        t1, none, (t2,) = flags["a"]
        assert none is None
        loss = None if labels is None else F.mse_loss(logits + t1, labels)
        return Out(loss, logits, {"z": (t2 * 2, None), "a": [3, "x"]})


def call(labels: bool) -> dict[str, Any]:
    out = {"ids": torch.randn(5, 4), "flags": {"scale": 2.0, "a": [torch.randn(3), None, (torch.randn(2),)]}}
    return {**out, "labels": torch.randn(5, 3) if labels else None}


def test_nested_inputs_and_dataclass_outputs_keep_their_types() -> None:
    from autopar import tree

    model, kwargs = Nested(), call(labels=True)
    graph = capture(model, (), kwargs)
    assert [i.name for i in graph.inputs if i.kind == "input"] == [
        "kwargs['ids']",
        "kwargs['flags']['a'][0]",
        "kwargs['flags']['a'][2][0]",
        "kwargs['labels']",
    ]
    assert sorted(map(str, graph.constants.values())) == ["2.0", "None"]
    out = tree.unflatten(graph.out_tree, [v for _, v in graph.out_leaves])
    assert type(out) is Out and list(out.extra) == ["z", "a"] and out.extra["a"] == [3, "x"]
    assert out.extra["z"][1] is None
    assert [(o.kind, o.name) for o in graph.outputs][:3] == [
        ("loss", "loss"),
        ("output", "output.logits"),
        ("output", "output.extra['z'][0]"),
    ]


def test_without_a_loss_every_output_has_a_tangent() -> None:
    graph = capture(Nested(), (), call(labels=False))
    assert [i.name for i in graph.inputs if i.kind == "tangent"] == ["output.logits"]
    assert not [o for o in graph.outputs if o.kind == "loss"]


class Pair(NamedTuple):
    y: Tensor
    n: int


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Pair:
        return Pair(self.a(x), 3)


@pytest.mark.parametrize(
    "loss_fn", [lambda out: out.y.sum(), lambda out, x: (out.y.mean(1) - x.mean(1)).square().sum()]
)
def test_loss_fn_takes_the_output_or_the_arguments_too(loss_fn: Any) -> None:
    model, x = Plain(), torch.randn(5, 4)
    graph = capture(model, (x,), loss_fn=loss_fn)
    assert [(o.kind, o.name) for o in graph.outputs][:2] == [("loss", "loss"), ("output", "output.y")]
    assert graph.out_leaves == (("output", 1), ("constant", 3))
    results = run_graph(capture(model, (x,), loss_fn=loss_fn, double=True), model, (x,), {})
    out = model(x)
    want = loss_fn(out) if loss_fn.__code__.co_argcount == 1 else loss_fn(out, x)
    assert torch.allclose(results["loss", "loss"].float(), want, rtol=1e-6)


def test_a_loss_fn_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"loss_fn must return a scalar .*, not a tensor of shape \(5, 3\)"):
        capture(Plain(), (torch.randn(5, 4),), loss_fn=lambda out: out.y)


class Forecast(nn.Linear):
    """Takes the labels, but leaves the loss to others."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Size(nn.Module):
    def forward(self, out: Tensor) -> Tensor:
        return out.square().mean()


class Row(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def cross_entropy(out: Tensor, x: Tensor, *, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


@pytest.mark.parametrize(
    ("loss_fn", "labels", "want"),
    [
        (nn.MSELoss(), {}, lambda out, x, y: F.mse_loss(out, x)),
        (nn.HuberLoss(), {}, lambda out, x, y: F.huber_loss(out, x)),
        (F.l1_loss, {}, lambda out, x, y: F.l1_loss(out, x)),
        (Size(), {}, lambda out, x, y: out.square().mean()),
        (cross_entropy, {"y": torch.tensor([3, 1, 2])}, lambda out, x, y: F.cross_entropy(out, y)),
    ],
)
def test_a_loss_module_takes_what_a_function_of_its_signature_would(loss_fn: Any, labels: Any, want: Any) -> None:
    model, x = Forecast(4, 4).double(), torch.randn(3, 4).double()
    loss = run_graph(capture(model, (x,), labels, loss_fn=loss_fn), model, (x,), labels)["loss", "loss"]
    assert torch.allclose(loss, want(model(x), x, labels.get("y")), rtol=1e-12)


def test_a_target_that_forward_does_not_take_is_refused_with_the_module_that_takes_it() -> None:
    x, y = torch.randn(3, 4), torch.tensor([3, 1, 2])
    with pytest.raises(InputError) as caught:
        capture(Row(), (x, y), loss_fn=lambda out, x, y: F.cross_entropy(out, y))
    assert str(caught.value) == (
        "Row.forward(x) does not take this call: too many positional arguments\n"
        "  try: loss_fn gets the arguments that forward takes and no others; for a target beside them, a module of "
        "yours around the model, and no loss_fn:\n    def forward(self, x, y): return self.loss(self.model(x), y)"
    )
    with pytest.raises(
        InputError, match="does not take this call: got an unexpected keyword argument 'y'\n  try: call the"
    ):
        capture(Row(), (x,), {"y": y})


def test_a_loss_fn_that_does_not_take_what_it_gets_is_named_with_how_it_was_called() -> None:
    x, y = torch.randn(3, 4), torch.tensor([3, 1, 2])
    with pytest.raises(CaptureError) as caught:
        capture(Forecast(4, 4), (x, y), loss_fn=nn.CrossEntropyLoss())
    assert str(caught.value) == (
        "loss_fn CrossEntropyLoss(input, target) failed on (output float32[3, 4], args[0] float32[3, 4], "
        "args[1] int64[3]): CrossEntropyLoss.forward() takes 3 positional arguments but 4 were given\n"
        "  try: a function of the output and every argument of the model's call, like "
        "loss_fn=lambda out, x, y: F.cross_entropy(out, y); where the model does not take the labels, a module of "
        "yours around it that does"
    )
    with pytest.raises(CaptureError, match=r"loss_fn .*\(out, x\) failed on(.|\n)*from test_capture.py:\d+, in .*mm"):
        capture(Forecast(4, 5), (x,), loss_fn=lambda out, x: out.mm(x).sum())


class Stranger:
    pass


class Strange(Plain):
    def forward(self, x: Tensor) -> Any:
        return {"loss": self.a(x).sum(), "cache": Stranger()}


def test_an_output_type_that_cannot_be_rebuilt_is_named() -> None:
    with pytest.raises(CaptureError, match=r"output\['cache'\] is a tests.test_capture.Stranger, a type that cannot"):
        capture(Strange(), (torch.randn(5, 4),))


class Ties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.emb.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        cache = torch.arange(4.0)
        self.rope = nn.Module()
        self.rope.register_buffer("cache", cache)
        self.register_buffer("cache2", cache)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, ids: Tensor) -> Tensor:
        self.steps += 1
        self.cache2.mul_(0.5)
        x = self.frozen(self.emb(ids) + self.cache2 + self.rope.cache)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_ties_frozen_unused_and_updated_tensors() -> None:
    model, args = Ties(), (torch.tensor([[0, 1, 2], [3, 4, 0]]),)
    graph = capture(model, args, double=True)
    assert {i.name: (i.names, i.trainable) for i in graph.inputs if i.kind == "parameter"} == {
        "unused": (("unused",), True),
        "emb.weight": (("emb.weight", "head.weight"), True),
        "head.bias": (("head.bias",), True),
        "frozen.weight": (("frozen.weight",), False),
        "frozen.bias": (("frozen.bias",), False),
    }
    assert {i.name: i.names for i in graph.inputs if i.kind == "buffer"} == {
        "cache2": ("cache2", "rope.cache"),
        "steps": ("steps",),
    }
    kinds = {(o.kind, o.name): o.node for o in graph.outputs}
    assert kinds["gradient", "unused"] is None and ("gradient", "frozen.weight") not in kinds
    assert ("buffer", "steps") in kinds and ("buffer", "cache2") in kinds
    results = run_graph(graph, model, args, {})
    assert results["buffer", "steps"] == 1 and torch.equal(results["buffer", "cache2"], torch.arange(4.0).double() / 2)
    want = run_eager(model, args, {})
    assert worst({k: v for k, v in results.items() if k[0] != "buffer"}, want) < 1e-14


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout2d(F.relu(self.norm(self.conv(x)), inplace=True), 0.3, self.training).square().mean()


def test_convolution_batch_norm_and_channel_dropout() -> None:
    model, args = BatchNorm(), (torch.randn(2, 3, 6, 7),)
    results = run_graph(capture(model, args, double=True), model, args, {})
    want = run_eager(model, args, {})
    assert worst({k: v for k, v in results.items() if k[0] != "buffer"}, want) < 1e-12
    for name, buffer in model.named_buffers():
        assert torch.allclose(results["buffer", name].double(), buffer.double(), rtol=1e-12)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, h: Tensor) -> Tensor:
        return self.b(h) if h.mean().item() > 0 else self.c(h)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.branch = nn.Linear(5, 4), Branch()

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(self.a(x)).square().sum()


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.new_ones(4, 2)).sum()


def test_a_forward_that_fails_while_it_is_traced_is_one_error_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"does not run on tensors(.|\n)*test_capture.py:\d+, in Narrow.forward"):
        capture(Narrow(), (torch.randn(2, 5, requires_grad=True),))


def test_a_data_dependent_branch_is_one_error_with_the_line_and_ways_out() -> None:
    with pytest.raises(CaptureError) as error:
        capture(Branching(), (torch.randn(2, 5),))
    first, line, ways = str(error.value).split("\n")
    assert "data-dependent branch" in first
    assert "test_capture.py:" in line and "in Branch.forward: return self.b(h) if h.mean().item() > 0" in line
    assert all(way in ways for way in ("autopar.opaque(module)", "torch.cond", "static value"))


def test_an_opaque_module_takes_either_branch_at_run_time() -> None:
    model, args = Branching(), (torch.randn(2, 5),)
    names = list(model.state_dict())
    opaque(model.branch)
    assert list(model.state_dict()) == names
    graph = capture(model, args, double=True)
    assert ops(graph).count("autopar.opaque.default") == 1
    for sign in (1.0, -1.0):
        model.zero_grad()
        with torch.no_grad():
            model.a.bias.fill_(5 * sign)
        assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) < 1e-14


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(4, 4), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) + torch.randn(x.shape) + torch.bernoulli(torch.full_like(x, 0.5))
        y = self.drop(F.dropout(self.a(x + noise), 0.2, self.training))
        return (y + torch.empty_like(y).normal_()).square().mean()


@pytest.mark.parametrize("train", [True, False])
def test_random_functions_draw_the_same_numbers_in_both(train: bool) -> None:
    model, args = Noisy().train(train), (torch.randn(6, 4),)
    graph = capture(model, args, double=True)
    assert ops(graph).count("autopar.dropout.default") == (4 if train else 0)
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) < 1e-13


class Shuffled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x[torch.randperm(4)] * x).sum()


def test_other_random_functions_are_refused_by_name_and_line() -> None:
    with pytest.raises(UnsupportedError, match=r"randperm(.|\n)*test_capture.py:\d+, in Shuffled.forward"):
        capture(Shuffled(), (torch.randn(4, 3, requires_grad=True),))


class Masked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind = nn.Linear(6, 18), kind

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 3).permute(2, 0, 3, 1, 4)
        n = x.shape[1]
        mask = {
            "causal": lambda: torch.ones(n, n, dtype=torch.bool).tril(),
            "float": lambda: torch.full((n, n), torch.finfo(x.dtype).min).triu(1),
            "whole": lambda: torch.ones(n, n, dtype=torch.bool),
            "given": lambda: given[:, None, None, :],
            "chosen": lambda: given[:, None, None, :] & (x.mean(2).topk(3).values.amin(1) < 9)[:, None, None, None],
            "other": lambda: torch.ones(n, n, dtype=torch.bool).tril(1),
        }[self.kind]()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().sum()


@pytest.mark.parametrize(
    ("kind", "causal", "masked"),
    [
        ("causal", True, False),
        ("float", True, False),
        ("whole", False, False),
        ("given", False, True),
        ("chosen", False, True),
        ("other", False, True),
    ],
)
def test_masks_made_of_constants_are_recognised(kind: str, causal: bool, masked: bool) -> None:
    model = Masked(kind)
    args = (torch.randn(2, 5, 6), torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    graph = capture(model, args, double=True)
    (node,) = [n for n in graph.fx.nodes if str(n.target) == "autopar.attention.default"]
    assert (node.args[4], node.args[3] is not None) == (causal, masked)
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) < 1e-13


class InPlace(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        x.mul_(2)
        return (x * w).sum()


def test_an_input_changed_in_place_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"changes input args\[0\] in place"):
        capture(InPlace(), (torch.randn(3), torch.randn(3, requires_grad=True)))


def test_inputs_may_get_gradients() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return (x * w).sum()

    graph = capture(Product(), (torch.randn(3), torch.randn(3, requires_grad=True)))
    assert [(o.kind, o.name) for o in graph.outputs] == [("loss", "loss"), ("input_gradient", "args[1]")]


def test_multihead_attention_of_torch_is_one_op_too() -> None:
    model = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.2, batch_first=True)
    args = (torch.randn(4, 5, 12),)
    graph = capture(model, args, loss_fn=lambda y: y.square().sum())
    found = ops(graph)
    assert found.count("autopar.attention.default") == 1 and found.count("autopar.dropout.default") == 6


class Recurrent(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 5, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].square().mean()


def test_recurrent_modules_keep_their_weights_twice() -> None:
    model, args = Recurrent(), (torch.randn(2, 3, 4),)
    graph = capture(model, args, double=True)
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) < 1e-13


def test_dropout_inside_a_recurrent_layer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"dropout=0.5 inside a recurrent(.|\n)*in Recurrent.forward: "):
        capture(Recurrent(0.5), (torch.randn(2, 3, 4),))


class Native(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.5, True)[0].sum()


def test_random_ops_of_the_library_underneath_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"draws random numbers(.|\n)*in Native.forward: return torch.native"):
        capture(Native(), (torch.randn(2, 3, requires_grad=True),))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.block, x, use_reentrant=self.reentrant).sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_checkpointed_is_computed_again(reentrant: bool) -> None:
    graph = capture(Checkpointed(reentrant), (torch.randn(3, 4),))
    assert ops(graph).count("aten.tanh.default") == 2, "in forward, and in backward"
    assert ops(graph).count("autopar.dropout.default") == 3, "of what comes in, again, and of the gradient"


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)]
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.a(x) * self.weights[which]).sum()


def test_a_hidden_parameter_is_refused_and_a_plain_tensor_is_a_constant() -> None:
    model, x = Hidden(), torch.randn(2, 3)
    with pytest.raises(CaptureError, match=r"a parameter of shape \(3,\) is used as a constant"):
        capture(model, (x, 0))
    graph = capture(model, (x, 1), double=True)
    assert len(graph.attributes) == 1 and list(graph.constants.values()) == [1]
    assert torch.allclose(run_graph(graph, model, (x, 1), {})["loss", "loss"].float(), model(x, 1))


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(4, 4), torch.tensor([0.1, 0.2, 0.3, 0.4])

    def forward(self, x: Tensor) -> Tensor:
        ratio = (x > 0).sum() / 7  # integers divided
        made = torch.arange(0, 1, 0.25) + torch.tensor(0.1) + torch.tensor(0.1, dtype=torch.float32) + self.scale
        low = self.a(x).to(torch.float32) * torch.finfo(torch.float32).eps
        return ((low + made) * ratio).mean(dtype=torch.float32) + torch.linspace(0, 1, 7).sum()


def test_numbers_made_inside_are_wide_too() -> None:
    model, args = Numbers(), (torch.randn(3, 4),)
    graph = capture(model, args, double=True)
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) <= 1e-15
    assert all(n.meta["val"].dtype != torch.float32 for n in graph.fx.nodes if n.op == "call_function")


class Recorder(nn.Module):
    """At its first call it hangs a hook on its part, and records what that gives in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        recorded: list[Tensor] = []
        if not getattr(self, "ready", False):
            self.part.register_forward_hook(lambda module, args, out: self.record(out))
            self.ready = True
        self.into = recorded
        loss = self.part(x).sum()
        del self.into
        return {"loss": loss, "recorded": recorded}

    def record(self, out: Tensor) -> None:
        self.into.append(out.detach() * 1.0)


def test_hooks_that_the_first_call_hangs_are_hung_once_in_every_trace() -> None:
    model, x = Recorder(), torch.ones(2, 3)
    graphs = [capture(model, (x,)) for _ in range(2)]
    for graph in graphs:
        assert [o.name for o in graph.outputs if o.kind == "output"] == ["output['recorded'][0]"]
        assert not graph.writes
    assert not model.part._forward_hooks and not hasattr(model, "ready")
    assert len(model(x)["recorded"]) == 1
