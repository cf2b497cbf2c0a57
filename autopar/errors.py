"""The errors a user can meet, few and named.

Each one tells, in this order: what is wrong with the numbers, the node, the user's source line, what to try.
All are `ValueError` children because a user can mend them; our own mistakes are `AssertionError`s that name the node.
"""


class AutoparError(ValueError):
    """Base of every error that autopar raises on purpose."""


class CaptureError(AutoparError):
    """The model cannot be traced to one graph (a data-dependent branch, a type that cannot be rebuilt)."""


class UnsupportedError(AutoparError):
    """The construct is understood, but no right program exists for it here."""


class RuleError(AutoparError):
    """A sharding rule is malformed or does not fit the op it was written for."""


class InputError(AutoparError):
    """The inputs of a call differ between ranks, or from what the program was made for."""


class ClusterError(AutoparError):
    """A cluster description is wrong; the message holds the path inside the file."""


class PlanError(AutoparError):
    """A plan is malformed, or was made for another graph, cluster or version."""


class NoPlan(AutoparError):
    """Nothing fits in the memory budget; the message holds the least budget that works, as does `needed_bytes`."""

    def __init__(self, message: str, needed_bytes: int = 0, budget_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes, self.budget_bytes = needed_bytes, budget_bytes


class SolverError(AutoparError):
    """The solver failed for a reason that is not the user's."""


class UnsafeFileError(AutoparError):
    """A file is neither JSON nor safetensors and was not opened."""
