"""The command `autopar`: `plan`, `plan-diff`, `explain`, `verify`, `verify-rule`, `run`.

In: the command line.  Out: text or JSON on standard output, progress on standard error, an exit code.
Next: `commands.py`.

Exit codes: 0 it worked; 1 a number is wrong or a rank failed; 2 the call is wrong (usage, a file, a cluster);
3 refused: nothing fits, or the model or strategy is one that autopar has no right program for.
"""

from __future__ import annotations

import os
import sys

from autopar.errors import AutoparError, CaptureError, NoPlan, UnsupportedError

USAGE, REFUSED = 2, 3
REFUSALS = (CaptureError, NoPlan, UnsupportedError)


def main() -> None:
    """The command line; the rest of autopar works without typer and rich, this does not."""
    try:
        from autopar.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"autopar: the command line needs {error.name}: pip install 'autopar[cli]'", file=sys.stderr)
        sys.exit(USAGE)
    try:
        app()
    except AutoparError as error:
        tell(error)
        sys.exit(REFUSED if isinstance(error, REFUSALS) else USAGE)


def tell(error: AutoparError) -> None:
    """Print an error; a rank leaves it to the process that started the ranks, which tells it once."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    else:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def entry() -> None:
    """The command as a process of its own."""
    same_hashes()
    main()


def same_hashes() -> None:
    """Begin anew with sets of strings in the same order as in the ranks that will be started from here.

    A model that walks through such a set traces another graph where the order is another.
    """
    if sys.argv[1:2] in (["run"], ["verify"]) and "PYTHONHASHSEED" not in os.environ:
        command = [sys.executable, "-m", "autopar.cli", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    entry()
