"""Ranks that stay alive between calls, for the parity harness and for tests.

In: a number of ranks, then functions.  Out: what each rank returned, or which rank failed and how.  Next: `run.py`.

    with Pool(4) as pool:
        losses = pool.run(train, "gpt", 3)             # train("gpt", 3) on 4 ranks -> [loss, loss, loss, loss]
        losses = pool.run(train, "gpt", 3, world=2)    # on 2 ranks

Starting a process that imports torch is slow, so ranks are forked from one server that imported it already, and live
on. Functions are found by module and name, so they must be at the top level of an importable module. Every call has a
limit: a rank that is stuck, or whose peer failed, is killed and told about; the next call starts fresh ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GRACE_S = 5.0  # how long the other ranks may go on once one has failed
PRELOAD = ("torch.distributed.tensor", "autopar.capture", "autopar.planner", "autopar.passes", "autopar.runtime.module")


@dataclass(frozen=True)
class Outcome:
    """What one rank did with a call: `value`, or the name of the `error` and its `text` (with a traceback)."""

    rank: int
    value: Any = None
    error: str = ""
    message: str = ""
    text: str = ""
    seconds: float = 0.0


class RankError(RuntimeError):
    """A call failed on at least one rank; `outcomes` tells what every rank did."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = [o for o in self.outcomes if o.error]
        first = min(failed, key=lambda o: (o.error in ("Killed", "Stuck"), o.seconds))
        others = "; ".join(f"rank {o.rank}: {o.error}: {o.message}" for o in failed if o is not first)
        super().__init__(f"rank {first.rank} of {len(self.outcomes)}: {first.text}" + (f"\n{others}" if others else ""))


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection


@dataclass
class Pool:
    """Up to `world` ranks on this machine, joined by gloo (or another `backend`).

    Every number of ranks has processes of its own, started when first asked for: a process that leaves a group and
    enters another keeps traces of the first one in torch's caches.
    """

    world: int
    timeout: float = 120.0
    backend: str = "gloo"
    _workers: dict[int, list[_Worker]] = field(default_factory=dict, repr=False)
    _groups: dict[int, str] = field(default_factory=dict, repr=False)
    _calls: Any = field(default_factory=itertools.count, repr=False)
    _folder: Any = field(default=None, repr=False)

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 0, timeout: float = 0.0, **kwargs: Any) -> list[Any]:
        """Call `fn` on ranks 0 .. world-1 and return what each gave; raise `RankError` if any of them failed."""
        outcomes = self.outcomes(fn, *args, world=world, timeout=timeout, **kwargs)
        if any(o.error for o in outcomes):
            raise RankError(outcomes)
        return [o.value for o in outcomes]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, world: int = 0, timeout: float = 0.0, **kwargs: Any
    ) -> list[Outcome]:
        """Call `fn` like `run`, and return what became of it on every rank instead of raising."""
        world = world or self.world
        if world > self.world:
            raise ValueError(f"this pool has {self.world} ranks, {world} were asked for")
        workers = self._start(world)
        group = (world, self._groups.setdefault(world, str(Path(self._folder.name) / f"group{next(self._calls)}")))
        task = pickle.dumps((sys.path, group, self.timeout, fn.__module__, fn.__qualname__, args, kwargs))
        for worker in workers:
            worker.pipe.send_bytes(task)
        outcomes = _collect(workers, timeout or self.timeout)
        if any(o.error for o in outcomes):
            self._groups.pop(world)  # its collectives may be out of step
        if any(o.error in ("Killed", "Stuck", "Died") for o in outcomes):
            self._end(world)
        return outcomes

    def close(self) -> None:
        """End the ranks; a later call starts new ones."""
        for world in list(self._workers):
            self._end(world)
        self._groups.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, world: int) -> None:
        for worker in self._workers.pop(world):
            with contextlib.suppress(OSError):
                worker.pipe.close()
            worker.process.kill()
            worker.process.join()

    def _start(self, world: int) -> list[_Worker]:
        """The ranks of a world, started if they are not there."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="autopar-pool-")
        if world not in self._workers:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(list(PRELOAD))
            self._workers[world] = []
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, self.backend, theirs), daemon=True)
                process.start()
                theirs.close()
                self._workers[world].append(_Worker(process, ours))
        return self._workers[world]


def _collect(workers: Sequence[_Worker], timeout: float) -> list[Outcome]:
    """What each rank answers, at most `timeout` seconds from now."""
    started = time.monotonic()
    deadline = started + timeout
    waiting = {w.pipe: rank for rank, w in enumerate(workers)}
    done: dict[int, Outcome] = {}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            done[rank] = _receive(rank, pipe, workers[rank].process, time.monotonic() - started)
            if done[rank].error:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    peers_failed = any(o.error for o in done.values())
    for rank in waiting.values():
        word, why = ("Killed", "waited for a peer that had failed") if peers_failed else ("Stuck", "")
        why = why or f"still running after {timeout:.0f} s"
        done[rank] = Outcome(rank, None, word, why, f"{word}: {why}", time.monotonic() - started)
    return [done[rank] for rank in range(len(workers))]


def _receive(rank: int, pipe: Connection, process: BaseProcess, seconds: float) -> Outcome:
    try:
        value, error, message, text = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        process.join(1.0)
        why = f"the process ended with exit code {process.exitcode}"
        return Outcome(rank, None, "Died", why, f"Died: {why}", seconds)
    return Outcome(rank, value, error, message, text, seconds)


def _serve(rank: int, backend: str, pipe: Connection) -> None:
    """What a rank does all its life: take a call, join the group it is for, answer."""
    import torch

    from autopar.runtime.world import share_cores

    faulthandler.enable()  # a rank that dies in C++ leaves its Python stack on standard error
    share_cores()
    torch.set_num_threads(1)
    group: tuple[int, str] | None = None
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        try:
            path, wanted, timeout, module, name, args, kwargs = pickle.loads(task)
            sys.path[:] = path
            if wanted != group:
                _join(rank, backend, wanted, timeout)
                group = wanted
            answer: tuple[Any, str, str, str] = (_find(module, name)(*args, **kwargs), "", "", "")
        except BaseException as error:  # noqa: BLE001 - reported to the caller, whatever it is
            answer = (None, type(error).__name__, str(error), traceback.format_exc())
        try:
            pipe.send_bytes(pickle.dumps(answer))
        except OSError:
            return
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            text = f"the result of {name} cannot be sent back: {error}"
            pipe.send_bytes(pickle.dumps((None, type(error).__name__, text, text)))


def _find(module: str, name: str) -> Callable[..., Any]:
    import importlib

    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _join(rank: int, backend: str, group: tuple[int, str], timeout: float) -> None:
    """Leave the old process group and enter the one that meets at a file."""
    from datetime import timedelta

    import torch.distributed as dist

    from autopar._torch import forget_meshes

    world, file = group
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world, timeout=limit)
