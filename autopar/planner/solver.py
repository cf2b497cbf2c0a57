"""Linear programmes, with some variables yes-or-no, solved by HiGHS through OR-Tools.

In: variables, rows, a time limit.  Out: `Solution`, with a bound.  Next: `program.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from ortools.math_opt import model_pb2, result_pb2
from ortools.math_opt.core.python import solver as core
from ortools.math_opt.python import mathopt
from pybind11_abseil.status import StatusNotOk

from autopar.errors import SolverError

Reason = result_pb2.TerminationReasonProto
FRACTION = 1e-6
GAP = 1e-7
BRANCHED_WHOLE = 1500  # variables
NEAR = 0.015  # of the bound: a large programme is not branched further for less
PRESOLVED = 150_000  # variables from which on looking for a smaller relaxation first takes less time than it saves


@dataclass(frozen=True)
class Solution:
    """Values of all variables.

    objective, bound   of the minimised sum; equal when the solution is proved best
    prices             of rows, where the yes-or-no variables were relaxed: what one unit more of a bound adds
    status             "optimal" | "feasible" (the time ran out) | "infeasible" | "unknown"
    """

    status: str
    values: Sequence[float] = ()
    objective: float = float("inf")
    bound: float = float("-inf")
    seconds: float = 0.0
    branched: bool = False
    prices: Mapping[int, float] = field(default_factory=dict)

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

    def relax(self, time_limit: float, seed: int = 0, costs: Mapping[int, float] | None = None) -> Solution:
        """The programme with yes-or-no variables anywhere between: a bound, and the prices of rows."""
        return self._solve(False, time_limit, seed, self.costs if costs is None else costs, frozenset())

    def branch(self, time_limit: float, seed: int = 0, closed: Iterable[int] = ()) -> Solution:
        """The programme as it is, perhaps with some variables kept at 0."""
        return self._solve(True, time_limit, seed, self.costs, frozenset(closed))

    def whole(self, solution: Solution) -> bool:
        """Whether every yes-or-no variable is one or the other."""
        values = solution.values
        return solution.status == "optimal" and all(min(values[b], 1 - values[b]) < FRACTION for b in self.binaries)

    def minimise(self, time_limit: float, seed: int = 0) -> Solution:
        """Solve the relaxation; branch where it is fractional.

        A large programme is first branched over the options that the relaxation uses: mostly that is near its bound.
        """
        started = time.monotonic()
        relaxed = self.relax(time_limit, seed)
        if not relaxed.found or self.whole(relaxed):
            return relaxed

        def left() -> float:
            return max(1.0, time_limit - (time.monotonic() - started))

        found = Solution("unknown")
        if self.size > BRANCHED_WHOLE:
            found = self.branch(left(), seed, set(self.binaries) - self.support(relaxed))
            found = replace(found, status="feasible" if found.found else "unknown", bound=relaxed.bound)
        if not found.found or found.gap > NEAR:
            found = min(self.branch(left(), seed), found, key=lambda one: one.objective)
        bound = min(max(relaxed.bound, found.bound), found.objective)
        return replace(found, bound=bound, seconds=time.monotonic() - started, branched=True)

    def support(self, solution: Solution) -> set[int]:
        """The yes-or-no variables that are not 0."""
        return {v for v in self.binaries if solution.values[v] > FRACTION}

    def zeros(self, closed: frozenset[int]) -> set[int]:
        """Variables that are 0 when some are: what flows out of a closed end."""
        out = set(closed) | {v for v, upper in enumerate(self.upper) if upper == 0.0}
        rows: dict[int, tuple[list[int], bool]] = {}
        for row, column, factor in zip(self.row_ids, self.column_ids, self.factors, strict=True):
            if self.row_lower[row] == self.row_upper[row] == 0.0:
                flows, open_end = rows.get(row, ([], False))
                if factor > 0:
                    flows.append(column)
                rows[row] = flows, open_end or (factor < 0 and column not in out)
        for flows, open_end in rows.values():
            if not open_end:
                out.update(flows)
        return out

    def proto(self, branch: bool, costs: Mapping[int, float], scale: float, zeros: set[int]) -> model_pb2.ModelProto:
        """The programme in the solver's own form: without what is 0, the objective scaled."""
        out = model_pb2.ModelProto()
        kept = [v for v in range(len(self.upper)) if v not in zeros]
        yes_or_no = set(self.binaries) if branch else set()
        out.variables.ids.extend(kept)
        out.variables.lower_bounds.extend([0.0] * len(kept))
        out.variables.upper_bounds.extend(self.upper[v] for v in kept)
        out.variables.integers.extend(v in yes_or_no for v in kept)
        priced = sorted((v, c * scale) for v, c in costs.items() if c and v not in zeros)
        out.objective.linear_coefficients.ids.extend(v for v, _ in priced)
        out.objective.linear_coefficients.values.extend(c for _, c in priced)
        out.linear_constraints.ids.extend(range(self.rows))
        out.linear_constraints.lower_bounds.extend(self.row_lower)
        out.linear_constraints.upper_bounds.extend(self.row_upper)
        entries = zip(self.row_ids, self.column_ids, self.factors, strict=True)
        live = [entry for entry in entries if entry[1] not in zeros] if zeros else list(entries)
        out.linear_constraint_matrix.row_ids.extend(r for r, _, _ in live)
        out.linear_constraint_matrix.column_ids.extend(c for _, c, _ in live)
        out.linear_constraint_matrix.coefficients.extend(f for _, _, f in live)
        return out

    def _solve(
        self, branch: bool, time_limit: float, seed: int, costs: Mapping[int, float], closed: frozenset[int]
    ) -> Solution:
        started = time.monotonic()
        scale = 1e3 / max((abs(c) for c in costs.values() if c), default=1e3)
        zeros = self.zeros(closed) if closed else set()
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=time_limit), random_seed=seed, relative_gap_tolerance=GAP,
            presolve=None if branch or self.size >= PRESOLVED else mathopt.Emphasis.OFF,
        )  # fmt: skip
        result = run(self.proto(branch, costs, scale, zeros), parameters)
        reason = result.termination.reason
        bound = result.termination.objective_bounds.dual_bound / scale
        seconds = time.monotonic() - started
        if reason in (Reason.TERMINATION_REASON_INFEASIBLE, Reason.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED):
            return Solution("infeasible", seconds=seconds)
        if not result.solutions or not result.solutions[0].HasField("primal_solution"):
            if reason == Reason.TERMINATION_REASON_NO_SOLUTION_FOUND:
                return Solution("unknown", bound=bound, seconds=seconds)
            raise SolverError(f"HiGHS stopped without a solution: {result.termination.detail}")
        best = result.solutions[0]
        values = [0.0] * len(self.upper)
        found = best.primal_solution.variable_values
        for variable, value in zip(found.ids, found.values, strict=True):
            values[variable] = value
        status = "optimal" if reason == Reason.TERMINATION_REASON_OPTIMAL else "feasible"
        duals = best.dual_solution.dual_values
        prices = {} if branch else {r: v / scale for r, v in zip(duals.ids, duals.values, strict=True) if v}
        objective = best.primal_solution.objective_value / scale
        return Solution(status, values, objective, bound, seconds, branch, prices)


def run(model: model_pb2.ModelProto, parameters: mathopt.SolveParameters) -> result_pb2.SolveResultProto:
    """Hand a programme to HiGHS; `mathopt.solve`, which wraps this, takes as long to read a basis as HiGHS to solve."""
    try:
        with quiet():
            return core.solve(
            model, mathopt.SolverType.HIGHS.value, mathopt.StreamableSolverInitArguments().to_proto(),
            parameters.to_proto(), mathopt.ModelSolveParameters().to_proto(), None,
            mathopt.CallbackRegistration().to_proto(), None, None,
        )  # fmt: skip
    except (StatusNotOk, RuntimeError, ValueError) as error:
        raise SolverError(f"HiGHS failed: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep off standard output, for a while, the lines that HiGHS prints there whatever it is told."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
