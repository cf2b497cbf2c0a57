"""From a graph and a cluster to a plan.

In: a captured graph, a cluster, a memory budget, perhaps a strategy.  Out: a `Plan`.  Next: `program.py`.
"""

from autopar.planner.random_plan import random_plan
from autopar.planner.search import plan

__all__ = ["plan", "random_plan"]
