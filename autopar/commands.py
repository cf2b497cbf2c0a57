"""The commands, each a thin layer over a function that can be called from Python.

In: arguments.  Out: text, JSON, exit codes.  Next: `verify/run.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from autopar import files, hf
from autopar.parsing import read_bytes, read_cluster, read_strategy
from autopar.pins import NONE
from autopar.pins import load as load_pins
from autopar.verify.target import Target

app = typer.Typer(
    help="Spread a single-device PyTorch model over a cluster.", no_args_is_help=True, pretty_exceptions_enable=False
)
err = Console(stderr=True)

Model = Annotated[str, typer.Argument(help="package.module:function returning (model, inputs), or hf:ClassName")]
Set = Annotated[list[str], typer.Option("--set", help="key=value for the function or the hf config; repeatable")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Seed = Annotated[int, typer.Option(help="seed of the model, its inputs and the random plans")]
Cluster = Annotated[str, typer.Option(help="a preset (cpu-gloo, dgx-h100, p4d, ...), a .yaml or .json file, detect")]
Devices = Annotated[int | None, typer.Option(help="number of devices")]
Hosts = Annotated[int | None, typer.Option(help="number of hosts of a preset")]
Strategy = Annotated[str | None, typer.Option(help="force one, like 'zero(3)' or 'ddp(2) * tensor(2)'")]
PinsFile = Annotated[Path | None, typer.Option("--pins", help="a YAML file of what is fixed: see docs/pins.md")]
Memory = Annotated[str | None, typer.Option(help="bytes a device may use, like 8GiB")]


@contextmanager
def working(what: str) -> Iterator[Any]:
    """A spinner on standard error while something long runs; nothing where that is no terminal."""
    with err.status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")


@app.command("plan")
def plan_command(
    model: Model,
    cluster: Cluster = "cpu-gloo",
    devices: Devices = None,
    hosts: Hosts = None,
    settings: Set = [],  # noqa: B006
    strategy: Strategy = None,
    pins: PinsFile = None,
    memory: Memory = None,
    time_limit: Annotated[float, typer.Option(help="seconds for the solver")] = 60.0,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="write the plan as JSON to this file")] = None,
    dump: Annotated[Path | None, typer.Option(help="write every intermediate graph and model to this folder")] = None,
    trace: Annotated[Path | None, typer.Option(help="write when everything happens, for Chrome and Perfetto")] = None,
    as_json: Json = False,
) -> None:
    """Plan MODEL for a cluster; no devices are needed."""
    target = Target.parse(model, hf.settings(settings), seed)
    where = read_cluster(cluster, devices, hosts)
    forced = read_strategy(strategy) if strategy else None
    bytes_of_device = read_bytes(memory) if memory else None
    pinned = load_pins(pins) if pins else NONE
    # Loaded once the words are known to be right: the compiler takes longer to load than they take to read.
    import torch

    from autopar.cost.trace import save_trace
    from autopar.dump import dump as write_dump
    from autopar.planning import plan_target

    torch.set_num_threads(1)  # next to nothing is computed on tensors, and with more it took longer
    started = time.perf_counter()
    with working(f"planning {target} for {where.devices} devices") as progress:
        made = plan_target(
            target,
            where,
            strategy=forced,
            pins=pinned,
            memory_bytes=bytes_of_device,
            time_limit=time_limit,
            seed=seed,
            progress=progress,
        )
        seconds = time.perf_counter() - started
        if dump is not None:
            progress("writing the dump")
            write_dump(made, dump)
    if out is not None:
        files.save(made.plan, out)
    if trace is not None:
        save_trace(made.timeline(), str(target), trace)
    typer.echo(files.dumps(made.plan) if as_json else str(made.plan), nl=not as_json)
    typer.echo(f"model to plan in {seconds:.1f} s", err=True)
    if dump is not None:
        typer.echo(f"dump in {dump}: " + ", ".join(sorted(p.name for p in dump.iterdir())), err=True)


@app.command("calibrate")
def calibrate_command(
    out: Annotated[Path, typer.Option("--out", "-o", help="the cluster file to write: .yaml or .json")],
    devices: Annotated[
        int | None, typer.Option(help="how many; by default all accelerators, or twice the cores")
    ] = None,
    dtypes: Annotated[list[str], typer.Option("--dtype", help="to time operations in; repeatable")] = ["float32"],  # noqa: B006
) -> None:
    """Measure this machine: products, other operations, collectives by size; about a minute and a half."""
    from autopar.calibrate.run import calibrate

    started = time.perf_counter()
    with working("calibrating") as progress:
        found = calibrate(devices, dtypes, progress)
    found.save(out)
    typer.echo(found.summary())
    typer.echo(f"{out} in {time.perf_counter() - started:.0f} s", err=True)


@app.command("explain")
def explain_command(
    collective: Annotated[str, typer.Option(help="all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, ...")],
    cluster: Cluster = "cpu-gloo",
    devices: Devices = None,
    hosts: Hosts = None,
    as_json: Json = False,
) -> None:
    """What a COLLECTIVE over all devices of a cluster costs: formulas, the algorithm chosen by size, a plot."""
    from autopar.explain import explain

    found = explain(collective, read_cluster(cluster, devices, hosts))
    typer.echo(json.dumps(found.json(), indent=2) if as_json else found.text())


@app.command("plan-diff")
def plan_diff_command(
    first: Annotated[Path, typer.Argument(help="a plan file of `autopar plan --out`")],
    second: Annotated[Path, typer.Argument(help="another")],
    as_json: Json = False,
) -> None:
    """What the plan in SECOND does differently from that in FIRST: mesh, costs, memory, ops, parameters."""
    from autopar.difference import difference, rows

    a, b = files.load(first), files.load(second)
    text = json.dumps([asdict(row) for row in rows(a, b)], indent=2) if as_json else difference(a, b)
    typer.echo(text or "the plans are the same")


@app.command("verify")
def verify_command(
    model: Model,
    world: Annotated[int, typer.Option(min=1, help="number of ranks")] = 4,
    families: Annotated[str, typer.Option(help="comma-separated; all that exist on this many ranks by default")] = "",
    random: Annotated[int, typer.Option(min=0, help="also this many random legal plans")] = 0,
    seed: Seed = 0,
    settings: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Train MODEL on real ranks under every plan family, and compare everything with one device."""
    from autopar.verify.families import FAMILIES, exists, names

    wanted = [f.strip() for f in families.split(",") if f.strip()] if families else names(world)
    if unknown := [f for f in wanted if f not in FAMILIES]:
        raise typer.BadParameter(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if impossible := [f for f in wanted if not exists(f, world)]:
        raise typer.BadParameter(f"{', '.join(impossible)} needs two mesh axes, which {world} ranks do not make")
    target = Target.parse(model, hf.settings(settings), seed)
    target.check()
    from autopar.verify.room import check_room
    from autopar.verify.run import Harness

    check_room(target, world)
    with Harness(world) as harness, working(f"verifying {target} on {world} ranks") as progress:
        report = harness.verify(target, world, wanted, random, seed, progress)
    typer.echo(json.dumps(report.json(), indent=2) if as_json else report.text())
    raise typer.Exit(report.exit_code)


@app.command("verify-rule")
def verify_rule_command(
    function: Annotated[str, typer.Argument(help="package.module:function, which runs the ops on example tensors")],
    as_json: Json = False,
) -> None:
    """Prove the sharding rules of your own ops: every cut is run in this process and compared with the whole op."""
    from autopar.verify.rule import verify_rule

    report = verify_rule(function)
    typer.echo(json.dumps(report.json(), indent=2) if as_json else report.text())
    raise typer.Exit(report.exit_code)


@app.command("run")
def run_command(
    model: Model,
    world: Annotated[int | None, typer.Option(min=1, help="ranks on this machine; one a device by default")] = None,
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 10,
    lr: Annotated[float, typer.Option(help="learning rate of AdamW")] = 1e-3,
    cluster: Annotated[
        str | None, typer.Option(help="a preset, a file, or detect; by default that of --plan, or else detect")
    ] = None,
    settings: Set = [],  # noqa: B006
    strategy: Strategy = None,
    pins: PinsFile = None,
    memory: Memory = None,
    plan: Annotated[Path | None, typer.Option(help="a plan file of `autopar plan --out`, instead of planning")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train MODEL for some steps; starts torchrun unless it runs under it already."""
    from autopar.runtime.world import share_cores
    from autopar.training import Job, check, cluster_of, work

    job = Job(
        model,
        tuple(settings),
        seed,
        steps,
        lr,
        cluster,
        strategy,
        memory,
        plan=str(plan) if plan else None,
        pins=str(pins) if pins else None,
        as_json=as_json,
    )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if world is not None and world != int(os.environ["WORLD_SIZE"]):
            raise typer.BadParameter(f"--world is {world}, but torchrun started {os.environ['WORLD_SIZE']} processes")
        work(job)
        return
    ranks = world or (cluster_of(job, None) if plan else read_cluster("detect", None, None)).devices
    check(job, ranks)
    share_cores()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from autopar.launch import launch

    code, error = launch(ranks, sys.argv[1:])
    if error:
        typer.echo(error, err=True)
    raise typer.Exit(code)
