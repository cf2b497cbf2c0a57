"""How fast this machine is, measured: `autopar calibrate`.

In: a machine.  Out: a cluster file.  Next: `probe.py`, the model that is timed.
"""
