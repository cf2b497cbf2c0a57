"""What runs a planned model: parameters as DTensors, programs behind guards, one autograd function.

In: a model, a graph, a plan.  Out: `ParallelModule`.  Next: `module.py`.
"""
