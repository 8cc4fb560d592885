"""The line of the user's code that something happened in."""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType, TracebackType

import torch

import verbund

_NOT_THE_USERS = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, verbund, os))


def users_line(where: FrameType | TracebackType | None) -> str:
    """`, FILE:LINE` of the innermost line that is neither torch's, nor Python's, nor ours, or nothing."""
    found = ""
    while where is not None:
        traceback = isinstance(where, TracebackType)
        code = where.tb_frame.f_code if isinstance(where, TracebackType) else where.f_code
        line = where.tb_lineno if isinstance(where, TracebackType) else where.f_lineno
        if not code.co_filename.startswith((*_NOT_THE_USERS, "<")):
            found = f", {code.co_filename}:{line}"
            if not traceback:
                break
        where = where.tb_next if isinstance(where, TracebackType) else where.f_back
    return found
