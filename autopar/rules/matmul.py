"""Products of matrices: the ops that cutting is about.

In: nothing.  Out: rows of the rule table.  Next: `pointwise.py`.
"""

from torch import ops

from autopar.rules.core import rule

aten = ops.aten

rule(aten.mm.default, "m k, k n -> m n", flops="2 m k n", linear="each")
rule(aten.bmm.default, "b m k, b k n -> b m n", flops="2 b m k n", linear="each")
