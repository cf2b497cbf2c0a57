"""Pins on one graph and one mesh: what they allow of an op and a parameter, and why they cannot be followed.

In: `Pins`, a graph, its axes, a mesh.  Out: `Pinned`, which the builder of the programme asks.  Next: `units.py`.

A pin is stronger than a strategy where it speaks: an op that is pinned along one mesh axis follows the strategy along
the others, a pinned parameter follows its pin alone. A pinned cut binds every op of the module that has such a letter;
the others are free.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.axes import Axes, Factors, computes, letter_names
from autopar.choices import roles
from autopar.errors import InputError, UnsupportedError
from autopar.graph import Graph, Input
from autopar.layout import MICRO, STAGE, Layout, Mesh
from autopar.pins import ANYTHING, Cut, ModulePin, ParameterPin, Pin, Pins
from autopar.placements import same_pieces, storable
from autopar.plan import ParameterPlan
from autopar.planner.options import homes, options

NAMELESS = re.compile(r"|f\d+")  # an axis that no rule has a name for


@dataclass(frozen=True)
class Pinned:
    """The pins of one search on one mesh."""

    pins: Pins
    axes: Axes
    mesh: Mesh
    known: dict[tuple[str, str], frozenset[str] | None] = field(default_factory=dict, repr=False, compare=False)

    def allows(self, node: fx.Node, axis: str, role: str) -> bool | None:
        """Whether the pin of an op's module lets a mesh axis play a role there; None where it does not say.

        Stages and microbatches are not what pins speak of.
        """
        pin = self.pins.module(node.meta.get("module", ""))
        if pin is None or axis in (STAGE, MICRO):
            return None
        if pin.whole:
            return not role
        if (node.name, axis) not in self.known:
            self.known[node.name, axis] = self.wanted(node, axis, dict(pin.cuts).get(axis))
        wanted = self.known[node.name, axis]
        return None if wanted is None else role in wanted

    def wanted(self, node: fx.Node, axis: str, what: str | None) -> frozenset[str] | None:
        """The roles in which a mesh axis cuts what was named; None where it can cut no such thing."""
        if what is None:
            return None
        if not what:
            return frozenset([""])
        found = frozenset(role for role in self.cuttable(node, axis) if what in (ANYTHING, *self.called(node, role)))
        return found or None

    def cuttable(self, node: fx.Node, axis: str) -> list[str]:
        """The letters of an op that a mesh axis can cut."""
        able = roles(self.axes.rule(node), self.mesh.size(axis), node)
        return [role for role in able if role and not role.startswith("+")]

    def called(self, node: fx.Node, letter: str) -> set[str]:
        """A letter, the letter of the rule that it is a factor of, the name of its axis."""
        return {letter, letter.partition("~")[0], letter_names(self.axes, node).get(letter, "")}

    def word(self, node: fx.Node, letter: str) -> str:
        """What a user would write for a letter: the name of its axis, else the letter if it is one of a rule's line."""
        name, base = letter_names(self.axes, node).get(letter, ""), letter.partition("~")[0]
        return base if NAMELESS.fullmatch(name) and base.isalpha() else "" if NAMELESS.fullmatch(name) else name

    # --- parameters ---------------------------------------------------------------------------------------------------

    def ways(
        self, entry: Input, factors: Factors, wanted: Iterable[Layout], levels: tuple[int, ...]
    ) -> tuple[ParameterPlan, ...] | None:
        """The ways to keep a parameter that its pin allows; None where there is no pin."""
        pin = self.pins.parameter(entry.names or (entry.name,))
        if pin is None:
            return None
        wanted = list(wanted)
        allowed = (*levels, pin.level) if pin.level is not None else levels
        kept = options(factors, wanted, self.mesh, levels=allowed, trainable=entry.trainable)
        stored, home = (self.fitted(pin, what, factors) for what in (pin.stored, pin.home))
        exact = replace(pin, stored=stored, home=home)
        if isinstance(stored, Layout) and storable(stored, self.mesh):
            bases = [home] if isinstance(home, Layout) else homes(factors, wanted, self.mesh)
            able = set(allowed) if entry.trainable else set(allowed) & {0, 3}
            kept = (*kept, *(way for way in kept_so(stored, bases) if way.level in able))
        return tuple(dict.fromkeys(way for way in kept if follows(way, exact))) or self.refuse(pin, entry, kept)

    def fitted(self, pin: Pin, given: Cut | None, factors: Factors) -> Cut | None:
        """A layout in the parameter's own factors; 108 rows may be 3 of 12 of 3."""
        if not isinstance(given, Layout) or given.factors == factors:
            return given
        if given.shape != Layout.whole(factors).shape:
            raise InputError(f"{self.pins.where}: {pin}: the dims of the parameter are {Layout.whole(factors)}")
        pairs = zip(given.factors, given.cuts, factors, strict=True)
        cuts = [same_pieces(old, cut, new, self.mesh) for old, cut, new in pairs]
        if None in cuts:
            raise UnsupportedError(
                f"{self.pins.where}: {pin}: on {self.mesh} its dims are cut as {Layout.whole(factors)}, which gives no "
                "such pieces"
            )
        return Layout(factors, tuple(cut for cut in cuts if cut is not None))

    def refuse(self, pin: Pin, entry: Input, kept: Iterable[ParameterPlan]) -> tuple[ParameterPlan, ...]:
        """No way to keep a parameter follows its pin."""
        legal = dict.fromkeys(f"level {way.level} stored {way.stored}" for way in kept)
        frozen = "" if entry.trainable else ", which is frozen and has no gradient to spread,"
        raise UnsupportedError(
            f"{self.pins.where}: {pin}: {entry.name}{frozen} cannot be kept so on {self.mesh}\n"
            f"  it can be kept as {'; '.join(list(legal)[:8])}"
        )

    # --- refusals -----------------------------------------------------------------------------------------------------

    def check(self, graph: Graph) -> None:
        """Refuse a name that nothing has, and a cut that no op of its module can follow."""
        paths = {node.meta.get("module", "") for node in graph.fx.nodes if computes(node)}
        owned = {name for e in graph.inputs if e.kind == "parameter" for name in e.names or (e.name,)}
        for section, known in ((self.pins.modules, ancestors(paths)), (self.pins.parameters, owned)):
            for pin in section:
                if not any(pin.names(path) for path in known):
                    near = difflib.get_close_matches(pin.name, sorted(known), 3, 0.3)
                    raise InputError(f"{self.pins.where}: {pin}: there is no such name here; near it {', '.join(near)}")
        for module in self.pins.modules:
            ruled = [n for n in graph.fx.nodes if computes(n) and self.pins.module(n.meta.get("module", "")) == module]
            for axis, what in module.cuts:
                if what and ruled and not any(self.wanted(node, axis, what) for node in ruled):
                    raise UnsupportedError(self.no_op(module, axis, what, ruled))

    def no_op(self, pin: ModulePin, axis: str, what: str, nodes: list[fx.Node]) -> str:
        """Why no op of a module can follow a pin: a node that comes near, and what would be legal."""
        legal = {self.word(node, role) for node in nodes for role in self.cuttable(node, axis)} - {""}
        having = [(n, x) for n in nodes for x in self.axes.rule(n).sizes if what in self.called(n, x)]
        lines = [f"{self.pins.where}: {pin}: no op there can be cut so on {self.mesh}"]
        if having:
            node, letter = having[0]
            size = self.axes.rule(node).sizes[letter]
            lines.append(f"  %{node.name} has {what} = {size}, which is whole there or too short")
            lines += [f"  from {node.meta['source']}"] if node.meta.get("source") else []
        return "\n".join([*lines, f"  {axis} can cut {', '.join(sorted(legal)) or 'nothing'} there"])

    def no_choice(self, node: fx.Node, able: Iterable[tuple[str, ...]]) -> str:
        """What stands in a refusal of an op that is left no way to run; empty where no pin is about it."""
        pin = self.pins.module(node.meta.get("module", ""))
        if pin is None:
            return ""
        ways = ", ".join(str(list(picked)) for picked in able)
        return f"{self.pins.where}: {pin}: it leaves no way to run %{node.name} on {self.mesh}\n  it can run as {ways}"


def follows(way: ParameterPlan, pin: ParameterPin) -> bool:
    """Whether a way to keep a parameter is what its pin asks for."""
    plain = pin.level in (None, way.level) and pin.keep in (None, way.keep)
    return plain and cut_so(way.stored, pin.stored) and cut_so(way.home, pin.home)


def cut_so(layout: Layout, given: Cut | None) -> bool:
    return given is None or layout == given or layout.axes == given


def kept_so(stored: Layout, bases: Iterable[Layout]) -> Iterator[ParameterPlan]:
    """The ways to keep a parameter in one layout; copies of levels 1 and 2 lack some of its cuts."""
    yield ParameterPlan(0, stored, stored)
    for home in bases:
        coarser = all(cut[: len(home.cut_at(place))] == home.cut_at(place) for place, _, cut in stored.places())
        if coarser and home != stored:
            yield from (ParameterPlan(level, home, stored) for level in (1, 2))
    yield from (ParameterPlan(3, stored, stored, keep) for keep in (False, True))


def ancestors(paths: Iterable[str]) -> set[str]:
    """Every module path with those above it."""
    return {".".join(path.split(".")[:i]) for path in paths for i in range(1, path.count(".") + 2)} - {""}
