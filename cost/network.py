"""A network that carries out schedules: what every device holds afterwards, and how long it took.

In: a `Schedule`, links, groups of devices.  Out: values, seconds.  Next: `comm.py`, whose seconds these are.

In each step a device sends at most one message and receives at most one on each level (what crosses hosts takes other
wires than what stays inside). A message uses the innermost level that joins its two devices, there the physical link
of the sender's block of `shared_by` devices and that of the receiver's. A step takes as long as its slowest message:
the latency, and the bytes of all messages on the same physical link over its bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from autopar.cost.schedules import SWITCH, Message, Schedule, Step
from autopar.links import Link

Values = Any  # a numpy array [devices, pieces]


def after(schedule: Schedule, before: Values) -> Values:
    """What the devices hold once the schedule ran; `before` and the result are [devices, pieces]."""
    held = numpy.concatenate([before, numpy.zeros_like(before[:1])])  # the last row is the switch
    for step in schedule.steps:
        sent = [held[m.source, list(m.pieces)].copy() for m in step]
        for message, values in zip(step, sent, strict=True):
            held[message.target, list(message.pieces)] = (
                values + message.add * held[message.target, list(message.pieces)]
            )
    return held[:-1]


@dataclass(frozen=True)
class Network:
    """Levels from the inside out; the outermost joins all devices."""

    links: tuple[Link, ...]

    def seconds(self, schedule: Schedule, count: float, groups: Sequence[Sequence[int]]) -> float:
        """Seconds of a schedule for `count` bytes that all groups run at a time, each device of it given by number."""
        piece, total, start = count * float(schedule.share), 0.0, 0.0
        for step in schedule.steps:
            sent = [(group, message) for group in groups for message in step]
            _check(step, [self.level(group, message) for group, message in sent[: len(step)]])
            total += self._step(sent, piece)
            start = max(start, *(self.level(group, message)[1].start_s for group, message in sent))
        return start + total

    def level(self, group: Sequence[int], message: Message) -> tuple[int, Link]:
        """The level that a message uses: the innermost that joins its two devices, or the group and its switch."""
        ends = group if SWITCH in (message.source, message.target) else (group[message.source], group[message.target])
        inside = (i for i, link in enumerate(self.links) if len({device // link.devices for device in ends}) == 1)
        index = next(inside, len(self.links) - 1)
        return index, self.links[index]

    def _step(self, sent: list[tuple[Sequence[int], Message]], piece: float) -> float:
        load: Counter[tuple[int, str, int]] = Counter()
        for group, message in sent:
            for key in self._used(group, message):
                load[key] += len(message.pieces)
        slowest = 0.0
        for group, message in sent:
            _, link = self.level(group, message)
            at_switch = SWITCH in (message.source, message.target)
            bandwidth = (link.in_network_bytes_per_s if at_switch else None) or link.bytes_per_s
            busiest = max(load[key] for key in self._used(group, message))
            slowest = max(slowest, link.latency_s + busiest * piece / bandwidth)
        return slowest

    def _used(self, group: Sequence[int], message: Message) -> list[tuple[int, str, int]]:
        """The physical links of a message: the one out of the sender's block, the one into the receiver's."""
        index, link = self.level(group, message)
        ends = (("out", message.source), ("in", message.target))
        shared = 1 if SWITCH in (message.source, message.target) else link.shared_by
        return [(index, way, group[end] // shared) for way, end in ends if end != SWITCH]


def _check(step: Step, levels: list[tuple[int, Link]]) -> None:
    """No device does two things of one kind on one level in a step."""
    for way in ("source", "target"):
        used = Counter((getattr(m, way), level) for m, (level, _) in zip(step, levels, strict=True))
        twice = [key for key, times in used.items() if times > 1 and key[0] != SWITCH]
        assert not twice, f"device and level {twice} are {way} of more than one message"
