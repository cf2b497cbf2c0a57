"""What happens to every torch call of the user's code while it is traced.

In: the model being traced and the placeholder of the random state.  Out: `Tracing`, a function mode that writes the
submodule's path and the user's line on every node and turns attention and random functions into single ops.
Next: `labels.py`, which reads what was written.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autopar import attention
from autopar.errors import UnsupportedError
from autopar.random import Draws

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
MODELS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "models") + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def rank(filename: str) -> int:
    """0 for the user's files, 1 for libraries of models, 2 for torch and autopar itself."""
    if filename.startswith((TORCH, "<frozen", "<string>")) or (filename.startswith(HERE) and not is_model(filename)):
        return 2
    return 1 if f"{os.sep}transformers{os.sep}" in filename or f"{os.sep}contextlib.py" in filename else 0


def is_model(filename: str) -> bool:
    return filename.startswith((MODELS, HERE + "models" + os.sep))


def line_of(code: CodeType, lineno: int) -> str:
    """`model.py:31, in GPT.forward: logits = self.head(x)`."""
    text = linecache.getline(code.co_filename, lineno).strip()
    return f"{os.path.basename(code.co_filename)}:{lineno}, in {code.co_qualname}: {text}"


def frame_line(frame: FrameType | None) -> str:
    """The innermost frame of the user, or of a model library where the user has none inside the model's call."""
    library: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if is_step(code):
            break
        grade = rank(code.co_filename)
        if grade == 0:
            return line_of(code, frame.f_lineno)
        if grade == 1 and library is None and not code.co_filename.endswith("contextlib.py"):
            library = frame
        frame = frame.f_back
    return "" if library is None else line_of(library.f_code, library.f_lineno)


def is_step(code: CodeType) -> bool:
    """The frame in which capture calls the model."""
    return code.co_name == "__call__" and code.co_filename == HERE + "capture.py"


def user_line(traceback: TracebackType | None) -> str:
    """The innermost line of the user in a traceback."""
    best, best_rank = "", 2
    while traceback is not None:
        code = traceback.tb_frame.f_code
        grade = rank(code.co_filename)
        if is_step(code):
            best, best_rank = "", 2  # what called capture is of no interest
        elif grade < 2 and grade <= best_rank:
            best, best_rank = line_of(code, traceback.tb_lineno), grade
        traceback = traceback.tb_next
    return best


ACTIVE: ContextVar[Tracing | None] = ContextVar("ACTIVE", default=None)  # the trace that is going on, if any


class Tracing(Draws):
    """Draws from autopar's generator, keeps attention whole, and annotates nodes with module path and line."""

    def __init__(self, model: nn.Module, rng: Tensor) -> None:
        super().__init__(rng)
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.stack: list[AbstractContextManager[Any]] = []
        self.hooks = ExitStack()

    def __enter__(self) -> Tracing:
        for handle in (
            register_module_forward_pre_hook(self.enter_module),
            register_module_forward_hook(self.leave_module, always_call=True),
        ):
            self.hooks.callback(handle.remove)
        token = ACTIVE.set(self)
        self.hooks.callback(ACTIVE.reset, token)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self.hooks.close()
        while self.stack:
            self.stack.pop().__exit__(None, None, None)

    def enter_module(self, module: nn.Module, _: Any) -> None:
        path = self.paths.get(id(module))
        if path is not None:
            context = torch.fx.traceback.annotate({"module": path})
            context.__enter__()
            self.stack.append(context)

    def leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in self.paths and self.stack:
            self.stack.pop().__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        source = frame_line(sys._getframe(1))
        with torch.fx.traceback.annotate({"source": source}):
            try:
                return super().__torch_function__(func, types, args, kwargs)
            except UnsupportedError as error:
                if "\n  from " in str(error):
                    raise
                first, *rest = str(error).split("\n")
                raise UnsupportedError("\n".join([first, f"  from {source}", *rest])) from error

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        return attention.attention(self, *args, **kwargs)
