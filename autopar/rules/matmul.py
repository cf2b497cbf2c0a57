"""Products of matrices: the ops that cutting is about.

In: nothing.  Out: rows of the rule table.  Next: `pointwise.py`.
"""

from torch import fx, ops

from autopar.rules.core import Instance, computed, instantiate, rule
from autopar.rules.order import named

aten = ops.aten

rule(aten.mm.default, "m k, k n -> m n", flops="2 m k n", linear="each")
rule(aten.bmm.default, "b m k, b k n -> b m n", flops="2 b m k n", linear="each")


@computed(aten.linalg_solve_triangular.default, "... u v, ... u k -> ... u k")
def solve_triangular(node: fx.Node) -> Instance:
    """Columns of the right-hand side are solved one by one, or rows where the triangle stands right of them."""
    side = "u k" if named(node, "left") else "k u"
    return instantiate(node, f"... u v, ... {side} -> ... {side}", whole="u v", linear="1")
