"""Low precision: what is stored, computed, gathered and reduced, beside FSDP2's recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from autopar import ClusterSpec, InputError, Precision, parallelize, plan
from autopar.axes import analyse
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.passes import copy_views
from autopar.precision import low
from autopar.verify.pool import Pool
from autopar.verify.target import Target

LEVELS = ("ddp()", "zero(1)", "zero(2)", "zero(3)")
EMULATED = Precision(param=torch.float32, reduce=torch.float64)


def cluster() -> ClusterSpec:
    return ClusterSpec.preset("cpu-gloo", devices=dist.get_world_size())


class Squares(nn.Module):
    """One product; its gradient is one product too."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6, generator=rng, dtype=torch.float64))
        self.register_buffer("shift", torch.full((6,), 1 / 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.weight.T
        return y.square().sum(), y.detach().double() + self.shift


class Classes(nn.Module):
    """A cross entropy of logits as they come, or cast to float32."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.up, self.cast = nn.Linear(4, 5), cast

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.up(x)
        return F.cross_entropy(logits.float() if self.cast else logits, labels)


@pytest.mark.parametrize("precision", ["bf16", "bfloat16", Precision(param=torch.bfloat16, output=torch.float32)])
def test_a_loss_in_a_low_dtype_is_told_with_the_cast_that_mends_it(precision: Any, caplog: Any) -> None:
    made = ClusterSpec.preset("cpu-gloo", devices=2)
    batch = (torch.randn(6, 4), torch.tensor([4, 0, 3, 1, 2, 2]))
    plan(Classes(cast=False), made, example_inputs=batch, precision=precision)
    told = "the loss is computed in bfloat16; for float32, as under autocast: logits.float() in the model"
    assert [r.getMessage() for r in caplog.records if r.name == "autopar"] == [told]
    caplog.clear()
    plan(Classes(cast=True), made, example_inputs=batch, precision=precision)
    plan(Classes(cast=False), made, example_inputs=batch)
    assert not [r for r in caplog.records if r.name == "autopar"]


def rows() -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def emulated(strategy: str, precision: Precision) -> tuple[float, list[torch.dtype]]:
    """Gap to gradients computed in float32 by every rank and summed in float64; dtypes of what a user sees."""
    module: Any = parallelize(Squares(), cluster(), strategy=strategy, precision=precision)
    optimizer = torch.optim.AdamW(module.parameters())
    loss, shifted = module(rows())
    loss.backward()
    weight = Squares().weight.detach().float()
    parts = [2 * (x @ weight.T).T @ x for x in rows().float().chunk(dist.get_world_size())]
    wanted = torch.stack([part.double() for part in parts]).sum(0)
    (parameter,) = module.parameters()
    gradient = parameter.grad.full_tensor()
    optimizer.step()
    state = optimizer.state[parameter]["exp_avg"]
    gap = float((gradient - wanted).abs().max() / wanted.abs().max())
    return gap, [t.dtype for t in (parameter, gradient, state, module.shift, loss, shifted)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", LEVELS)
def test_gradients_are_summed_in_the_dtype_of_reductions(ranks: Pool, strategy: str, world: int) -> None:
    double, single = torch.float64, torch.float32
    for gap, dtypes in ranks.run(emulated, strategy, EMULATED, world=world):
        assert gap < 1e-15
        assert dtypes == [double, double, double, double, single, double]


def test_without_a_dtype_of_reductions_they_are_summed_as_computed(ranks: Pool) -> None:
    for gap, dtypes in ranks.run(emulated, "ddp()", Precision(param=torch.float32, output=torch.bfloat16), world=2):
        assert 1e-12 < gap < 1e-6
        assert dtypes[1] == torch.float64 and dtypes[4:] == [torch.bfloat16, torch.bfloat16]


# --- beside FSDP2 -----------------------------------------------------------------------------------------------------

STEPS, ROWS = 50, 16


class Classifier(nn.Module):
    """Three layers and a loss in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x).float(), labels)


def model_and_batch() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Classifier(), (torch.randn(ROWS, 16), torch.randint(8, (ROWS,)))


def losses(module: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    out = []
    for _ in range(STEPS):
        loss = module(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.detach().float())
    return torch.stack(out)


def of_fsdp2(order: Tensor) -> Tensor:
    """FSDP2's losses, the rows of the batch in another order: other rows are summed on another rank."""
    model, batch = model_and_batch()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    found = losses(model, *(t[order].chunk(dist.get_world_size())[dist.get_rank()] for t in batch))
    dist.all_reduce(found)
    return found / dist.get_world_size()


def beside_fsdp2(strategy: str) -> tuple[float, float]:
    """(largest gap of our losses to FSDP2's, largest gap of FSDP2's to its own in another order of rows)."""
    one = of_fsdp2(torch.arange(ROWS))
    other = of_fsdp2(torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)))
    model, batch = model_and_batch()
    ours = losses(parallelize(model, cluster(), strategy=strategy, precision="bf16"), *batch)
    return float((ours - one).abs().max()), float((one - other).abs().max())


@pytest.mark.parametrize("strategy", ["ddp()", "zero(1)", "zero(3)"])
def test_losses_in_bf16_are_as_near_to_fsdp2_as_it_is_to_itself(ranks: Pool, strategy: str) -> None:
    for gap, spread in ranks.run(beside_fsdp2, strategy, world=2):
        assert gap <= 2 * spread, (gap, spread)


def scaled(overflow: bool) -> tuple[float, float]:
    """(change of the weight, scale) after a step in fp16 under a scaler."""
    module: Any = parallelize(
        nn.Sequential(nn.Linear(4, 4)), cluster(), loss_fn=mean_square, strategy="zero(3)", precision="fp16"
    )
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.full((4, 4), 6e4 if overflow else 0.5)
    scaler.scale(module(x)).backward()
    before = [p.detach().clone() for p in module.parameters()]
    scaler.step(optimizer)
    scaler.update()
    change = max(float((a - b).full_tensor().abs().max()) for a, b in zip(before, module.parameters(), strict=True))
    return change, scaler.get_scale()


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def test_a_scaler_skips_what_overflows(ranks: Pool) -> None:
    assert all(change > 0 and scale == 1024 for change, scale in ranks.run(scaled, False, world=2))
    assert all(change == 0 and scale == 512 for change, scale in ranks.run(scaled, True, world=2))


@pytest.mark.parametrize("wrong", ["half", 16, torch.bfloat16])
def test_other_words_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="precision is "):
        parallelize(Squares(), ClusterSpec.preset("cpu-gloo", devices=1), precision=wrong)
    with pytest.raises(InputError, match=r"param=torch\.int8"):
        Precision(param=torch.int8)


class Mixed(nn.Module):
    """A float32 buffer beside parameters in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x * self.scale).sum()


def test_a_product_of_two_dtypes_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"aten\.\w+\.default takes tensors of one dtype and gets") as refused:
        capture(Mixed(), (torch.ones(3, 4),), precision=low("bf16"))
    assert all(part in str(refused.value) for part in ("float32[3, 4]", "bfloat16[4, 4]", "test_precision.py:"))
    capture(Mixed(), (torch.ones(3, 4),))


MODELS = [f"autopar.models.{name}:tiny" for name in ("gpt", "llama", "moe", "t5", "vit", "encoder", "unet", "resnet")]
MODELS += ["hf:LlamaForCausalLM", "hf:WhisperForConditionalGeneration", "hf:MambaForCausalLM", "hf:MixtralForCausalLM"]


@pytest.mark.parametrize("name", MODELS)
def test_models_are_captured_in_low_precision(name: str) -> None:
    built = Target.parse(name, {"tiny": True} if name.startswith("hf:") else {}).build()
    analyse(copy_views(capture(built.model, built.args, built.kwargs, precision=low("bf16"))))


def trained_low(name: str, strategy: str) -> tuple[float, set[torch.dtype]]:
    """Loss of a model in bf16, and dtypes of its gradients."""
    built = Target.parse(name, {"tiny": True} if name.startswith("hf:") else {}).build()
    ours: Any = parallelize(built.model, cluster(), strategy=strategy, precision="bf16")
    loss = getattr(out := ours(*built.args, **built.kwargs), "loss", out)
    loss.backward()
    return float(loss), {p.grad.dtype for p in ours.parameters() if p.grad is not None}


@pytest.mark.parametrize("name, strategy", [("autopar.models.llama:tiny", "zero(3)"), (MODELS[-1], "expert()")])
def test_models_train_in_low_precision(ranks: Pool, name: str, strategy: str) -> None:
    first, second = ranks.run(trained_low, name, strategy, world=2)
    assert first == second == (pytest.approx(4.0, abs=0.5), {torch.float32})


def reduced(strategy: str, stored: torch.dtype, reduce: torch.dtype) -> tuple[bool, bool]:
    """Whether a gradient is a sum in the dtype of reductions, in some order; whether it is one in the stored dtype."""
    model = Squares().to(stored)
    weight, x = model.weight.detach().clone(), rows().to(stored)
    module: Any = parallelize(model, cluster(), strategy=strategy, precision=Precision(reduce=reduce))
    loss, _ = module(x)
    loss.backward()
    parts = [2 * (part @ weight.T).T @ part for part in x.chunk(dist.get_world_size())]
    gradient = next(module.parameters()).grad.full_tensor()
    asked = torch.stack([part.to(reduce) for part in parts]).sum(0).to(stored)
    near = (gradient - asked).abs().max() <= 4 * torch.finfo(reduce).eps * asked.abs().max()
    representable = torch.equal(gradient, gradient.to(reduce).to(stored))
    return bool(near) and representable, torch.equal(gradient, torch.stack(parts).sum(0))


@pytest.mark.parametrize("strategy", ["ddp()", "zero(2)", "zero(3)"])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_gradients_are_reduced_in_a_narrower_or_wider_dtype_than_stored(
    ranks: Pool, strategy: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert ranks.run(reduced, strategy, *dtypes, world=3) == [(True, False)] * 3
