"""Start the ranks of `autopar run` on this machine, and tell one error where they all raise it.

In: a number of ranks, the words of the command line.  Out: an exit code and an error.  Next: `training.py`, what each
rank does.

A rank writes its error to the file that torchelastic names; here it is read back.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from uuid import uuid4

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(ranks: int, words: Sequence[str]) -> tuple[int, str]:
    """Run `autopar WORDS` as that many processes; (0, ""), or the exit code and the error of the first that failed."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    logging.disable(logging.CRITICAL)  # of this process, which only waits: the ranks tell what there is to tell
    try:
        elastic_launch(config, sys.executable)("-m", "autopar.cli", *words)
    except ChildFailedError as failed:
        told = [failure for _, failure in sorted(failed.failures.items()) if message(failure)]
        if told:
            return told[0].exitcode, message(told[0])
        rank, first = failed.get_first_failure()
        return 1, f"rank {rank} ended with exit code {first.exitcode}"
    finally:
        logging.disable(logging.NOTSET)
    return 0, ""


def message(failure: ProcessFailure) -> str:
    """The error that a rank wrote down; nothing if it ended otherwise."""
    written: object = failure.message
    return str(written["message"]) if isinstance(written, dict) else ""
