"""Small plain torch models to try things on; each file has `tiny()` returning (model, example inputs).

Example inputs are a tuple (positional arguments) or a dict (keyword arguments). Next: `mlp.py`.
"""
