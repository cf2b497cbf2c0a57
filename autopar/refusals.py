"""What capture refuses before it traces anything.

In: the parameters of a model.  Out: nothing, or an `UnsupportedError`.  Next: `capture.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import UnsupportedError
from autopar.swap import Named


def check_parameters(parameters: Sequence[Named]) -> None:
    """No parameter that is trained is complex: torch's optimizers, given DTensors, update pieces of one wrongly."""
    for parameter in parameters:
        if parameter.tensor.is_complex() and parameter.tensor.requires_grad:
            raise UnsupportedError(
                f"parameter {parameter.names[0]} is {parameter.tensor.dtype}: torch's optimizers give "
                "wrong numbers for complex parameters that are kept in pieces\n"
                "  try: a real parameter with a last dim of 2, and torch.view_as_complex(parameter) in the forward"
            )
