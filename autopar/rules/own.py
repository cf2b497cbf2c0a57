"""Rules that users give to their own ops: `autopar.rule(op, "b d, d -> b d")`.

In: an op of `torch.library`, a line in the notation of `core.py`.  Out: a row of the rule table, or a `RuleError` that
tells at once what is wrong with it.  Next: `verify/rule.py`, which proves it by running it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import fx

from autopar import _torch
from autopar.errors import RuleError
from autopar.rules import table  # noqa: F401  (it holds the ops that have a rule)
from autopar.rules.core import ENTRY, RULES, Instance, Rule, instantiate

LETTER = re.compile(r"[A-Za-z]\w*")
KINDS = ("max", "min", "same")


def rule(
    op: Any,
    spec: str,
    *,
    whole: str = "",
    linear: str | None = None,
    kinds: Mapping[str, str] | None = None,
    flops: str | None = None,
    shape: int | None = None,
    names: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Give an op of yours a sharding rule: `autopar.rule(my_op, "b d, d -> b d")`.

    op      what `torch.library.custom_op` made, `torch.ops.mine.op`, or one overload of it
    spec    left of the arrow one entry per tensor argument, keyword ones too, right of it one per result; equal letters
            are cut together, a letter that is missing on the right was summed over. `...`, `1`, `(a b)` and all
            keywords are explained in docs/rule-authoring.md
    whole   letters that must not be cut
    linear  how a sum whose terms lie on several devices may pass: "each", "all", or numbers of entries, "0" or "1+2"
    kinds   letter -> "max" | "min" where a missing letter was not summed over, "same" where the result ignores it;
            "k:1" is for result 1 alone
    flops   "2 m k n": a number and letters, floating-point operations of the whole op
    shape   position of the argument that holds the sizes of the result
    names   letter -> name of the axis, for printing, strategies and pins
    sizes   letter -> size, where no dim shows it

    Raises RuleError if the rule does not fit the schema of the op, or the op has another rule.
    """
    target = _torch.overload(op)
    if target is None:
        raise RuleError(f"{op!r} is no op; give what torch.library.custom_op made, or torch.ops.NAMESPACE.NAME.default")
    line = Line(spec, whole, linear, kinds or {}, flops, shape, names or {}, sizes or {})
    for problem in line.problems(target._schema):
        raise RuleError(f"the rule `{spec}` does not fit {target}: {problem}\n  the op is {target._schema}")
    known = RULES.get(target)
    if known is not None and known.given != str(line):
        raise RuleError(
            f"{target} has a rule already: `{known.given or known.text}`\n  try: one rule an op; a variant that is cut "
            "in another way is another op"
        )
    RULES[target] = Rule(line.instance, spec, shape, given=str(line))


@dataclass(frozen=True)
class Line:
    """A rule as it was given; see `rule`."""

    spec: str
    whole: str
    linear: str | None
    kinds: Mapping[str, str]
    flops: str | None
    shape: int | None
    names: Mapping[str, str]
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        """The rule with the keywords that were given."""
        keywords = [(f.name, getattr(self, f.name)) for f in fields(self)[1:]]
        return " ".join([self.spec, *(f"{name}={value!r}" for name, value in keywords if value not in ("", None, {}))])

    def instance(self, node: fx.Node) -> Instance:
        """The rule at a node."""
        return instantiate(
            node,
            self.spec,
            whole=self.whole,
            linear=self.linear,
            kinds=self.kinds,
            flops=self.flops,
            names=self.names,
            sizes=self.sizes,
        )

    def problems(self, schema: Any) -> Iterator[str]:
        """What is wrong with it, before any node is known."""
        if schema.is_mutable:
            changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            yield f"the op changes {', '.join(changed)} in place, which no program does; let it return a new tensor"
        if self.spec.count("->") != 1:
            yield "a rule has one arrow, with operands on its left and results on its right"
            return
        left, right = (side.split(",") for side in self.spec.split("->"))
        tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        left = left if tensors or any(entry.strip() for entry in left) else []
        if len(left) != len(tensors):
            yield f"it has {len(left)} entries for {len(tensors)} tensor arguments ({', '.join(tensors)})"
        if len(right) != len(schema.returns):
            yield f"it has {len(right)} entries for {len(schema.returns)} results"
        yield from (problem for entry in (*left, *right) for problem in entry_problems(entry))
        yield from product_problems((*left, *right), self.sizes)
        reads, gives = ({x for entry in side for x in letters(entry)} for side in (left, right))
        if (fresh := gives - reads - set(self.whole.split())) and self.shape is None:
            yield f"{told(fresh)} stands only on the right, where nothing tells the size of a piece; name it in whole"
        yield from self.keyword_problems(schema, reads | gives, len(left), len(right))

    def keyword_problems(self, schema: Any, known: set[str], entries: int, results: int) -> Iterator[str]:
        """What is wrong with the keywords."""
        used: dict[str, Iterable[str]] = {"whole": self.whole.split(), "flops": (self.flops or "").split()[1:]}
        used |= {"names": self.names, "sizes": self.sizes, "kinds": [key.partition(":")[0] for key in self.kinds]}
        for keyword, found in used.items():
            if unknown := set(found) - (known - {"..."}):
                yield f"{keyword} names {told(unknown)}, but the letters are {told(known - {'...'})}"
        if self.shape is not None and "Int[]" not in type_of(schema.arguments, self.shape):
            yield f"shape={self.shape}, but that argument is no list of sizes"
        if self.linear not in (None, "each", "all"):
            yield from linear_problems(str(self.linear), entries)
        if self.flops is not None and not re.fullmatch(r"\d+(\.\d+)?(e\d+)?", self.flops.partition(" ")[0]):
            yield f"flops={self.flops!r} starts with no number; write one like '2 m k n'"
        for key, kind in self.kinds.items():
            if kind not in KINDS or key.partition(":")[2] not in ("", *map(str, range(results))):
                yield f"kinds has {key!r}: {kind!r}; a key is a letter or letter:result, a value {', '.join(KINDS)}"


def entry_problems(entry: str) -> Iterator[str]:
    """What is wrong with one entry by itself."""
    found = letters(entry)
    for letter in found:
        if letter != "..." and not LETTER.fullmatch(letter):
            yield f"{letter!r} in `{entry.strip()}` is no letter; write a, b or heads, `1`, `...`, `(a b)`"
    if twice := {x for x in found if found.count(x) > 1}:
        yield f"{told(twice)} stands twice in `{entry.strip()}`; every dim of a tensor has a letter of its own"


def product_problems(entries: Iterable[str], sizes: Mapping[str, int]) -> Iterator[str]:
    """Whether the sizes of the letters of every product follow from other dims."""
    parts = [part for entry in entries for part in ENTRY.findall(entry)]
    known = {*(part for part in parts if part[0] != "("), *sizes}
    for part in (part for part in parts if part[0] == "("):
        open_ = [x for x in part.strip("()").split() if x not in known]
        if len(open_) > 1:
            yield f"nothing tells the sizes of {' and '.join(open_)} in `{part}`; give one of them in sizes"
        known |= set(open_)


def letters(entry: str) -> list[str]:
    """The letters of one entry, `...` among them."""
    return [x for part in ENTRY.findall(entry) for x in part.strip("()").split() or [part] if x != "1"]


def linear_problems(linear: str, count: int) -> Iterator[str]:
    """Whether every number is one of an entry."""
    for together in linear.split():
        for number in together.split("+"):
            if not number.isdigit() or int(number) >= count:
                yield f"linear={linear!r}: {number!r} is no entry; write 'each', 'all', or 0 to {count - 1}"


def type_of(arguments: Sequence[Any], position: int) -> str:
    """`SymInt[]` and the like, as schemas write it."""
    return str(arguments[position]).split(" ")[0] if 0 <= position < len(arguments) else ""


def told(found: Iterable[str]) -> str:
    """Letters in a sentence."""
    return ", ".join(sorted(found)) or "none"
