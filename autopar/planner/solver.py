"""Linear programmes, with some variables yes-or-no, solved by HiGHS through OR-Tools.

In: variables, rows, a time limit.  Out: `Solution`, with a bound.  Next: `program.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autopar.errors import SolverError

FRACTION = 1e-6
GAP = 1e-7


@dataclass(frozen=True)
class Solution:
    """Values of all variables.

    objective, bound   of the minimised sum; equal when the solution is proved best
    status             "optimal" | "feasible" (the time ran out) | "infeasible" | "unknown"
    """

    status: str
    values: Sequence[float] = ()
    objective: float = float("inf")
    bound: float = float("-inf")
    seconds: float = 0.0
    branched: bool = False

    @property
    def found(self) -> bool:
        return self.status in ("optimal", "feasible")

    @property
    def gap(self) -> float:
        """Relative distance between objective and bound."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-12)


@dataclass
class Model:
    """A minimisation; variables are numbers, rows are sums of (variable, factor) between two bounds."""

    upper: list[float] = field(default_factory=list)
    binaries: list[int] = field(default_factory=list)
    costs: dict[int, float] = field(default_factory=dict)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    row_ids: list[int] = field(default_factory=list)
    column_ids: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.upper)

    @property
    def rows(self) -> int:
        return len(self.row_lower)

    def variable(self, upper: float = 1.0) -> int:
        """A new variable between 0 and `upper`."""
        self.upper.append(upper)
        return len(self.upper) - 1

    def binary(self) -> int:
        """A new yes-or-no variable."""
        self.binaries.append(len(self.upper))
        return self.variable()

    def forbid(self, variable: int) -> None:
        """Fix a variable to 0."""
        self.upper[variable] = 0.0

    def cost(self, variable: int, amount: float) -> None:
        """Add to the objective."""
        self.costs[variable] = self.costs.get(variable, 0.0) + amount

    def row(self, terms: Iterable[tuple[int, float]], lower: float = float("-inf"), upper: float = float("inf")) -> int:
        """lower <= sum of terms <= upper; the number of the row."""
        summed: dict[int, float] = {}
        for variable, factor in terms:
            summed[variable] = summed.get(variable, 0.0) + factor
        made = len(self.row_lower)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        kept = sorted((v, f) for v, f in summed.items() if f)
        self.row_ids += [made] * len(kept)
        self.column_ids += [v for v, _ in kept]
        self.factors += [f for _, f in kept]
        return made

    def minimise(self, time_limit: float, seed: int = 0, costs: dict[int, float] | None = None) -> Solution:
        """Solve the relaxation; branch where it is fractional."""
        started = time.monotonic()
        costs = self.costs if costs is None else costs
        scale = 1e3 / max((abs(c) for c in costs.values() if c), default=1e3)
        relaxed = self._solve(False, time_limit, seed, costs, scale)
        if not relaxed.found:
            return relaxed
        whole = relaxed.status == "optimal" and all(
            min(relaxed.values[b], 1 - relaxed.values[b]) < FRACTION for b in self.binaries
        )
        bound, found = relaxed.bound, relaxed
        if not whole:
            left = max(1.0, time_limit - (time.monotonic() - started))
            found = self._solve(True, left, seed, costs, scale)
            bound = max(bound, found.bound)
        seconds = time.monotonic() - started
        bound = min(bound, found.objective) / scale
        return Solution(found.status, found.values, found.objective / scale, bound, seconds, not whole)

    def proto(self, branch: bool, costs: dict[int, float], scale: float) -> model_pb2.ModelProto:
        """The programme in the solver's own form, its objective scaled."""
        out = model_pb2.ModelProto()
        count = len(self.upper)
        out.variables.ids.extend(range(count))
        out.variables.lower_bounds.extend([0.0] * count)
        out.variables.upper_bounds.extend(self.upper)
        yes_or_no = set(self.binaries) if branch else set()
        out.variables.integers.extend(v in yes_or_no for v in range(count))
        priced = sorted((v, c * scale) for v, c in costs.items() if c)
        out.objective.linear_coefficients.ids.extend(v for v, _ in priced)
        out.objective.linear_coefficients.values.extend(c for _, c in priced)
        out.linear_constraints.ids.extend(range(self.rows))
        out.linear_constraints.lower_bounds.extend(self.row_lower)
        out.linear_constraints.upper_bounds.extend(self.row_upper)
        out.linear_constraint_matrix.row_ids.extend(self.row_ids)
        out.linear_constraint_matrix.column_ids.extend(self.column_ids)
        out.linear_constraint_matrix.coefficients.extend(self.factors)
        return out

    def _solve(self, branch: bool, time_limit: float, seed: int, costs: dict[int, float], scale: float) -> Solution:
        model = mathopt.Model.from_model_proto(self.proto(branch, costs, scale))
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=time_limit), random_seed=seed, relative_gap_tolerance=GAP,
            presolve=None if branch else mathopt.Emphasis.OFF,
        )  # fmt: skip
        try:
            result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise SolverError(f"HiGHS failed: {error}") from error
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return Solution("infeasible")
        if not result.has_primal_feasible_solution():
            if reason == mathopt.TerminationReason.NO_SOLUTION_FOUND:
                return Solution("unknown", bound=result.dual_bound())
            raise SolverError(f"HiGHS stopped without a solution: {result.termination}")
        values = result.variable_values(list(model.variables()))
        status = "optimal" if reason == mathopt.TerminationReason.OPTIMAL else "feasible"
        return Solution(status, values, result.objective_value(), result.dual_bound())
