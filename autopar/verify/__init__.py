"""The parity harness: the delivered module on real ranks against the untouched module on one device.

In: a model, a number of ranks, plan families.  Out: the largest error of every kind of tensor.  Next: `run.py`.

    target.py      what to check            reference.py   the single device, in a process of its own
    steps.py       the training loop        rank.py        the same loop on the ranks
    compare.py     what an error is         count.py       collectives and flops that really ran
    families.py    what to force            pool.py        ranks that stay alive

`rule.py` proves rules of ops, by `cuts.py`, with ranks that take turns in one process (`simulate.py`).
"""
