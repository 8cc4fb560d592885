"""Sleeping until a word in shared memory changes (Linux, x86-64)."""

from __future__ import annotations

import ctypes

_CALL = 202
_WAIT, _WAKE = 0, 1
_ALL = 1 << 30

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep(address: int, value: int, seconds: float) -> None:
    """Sleeps until somebody wakes those who sleep at `address`, at most `seconds` (below one).

    Returns at once if the lower half of the word is no longer that of `value`.
    """
    limit = _Time(0, int(seconds * 1e9))
    _syscall(
        ctypes.c_long(_CALL),
        ctypes.c_void_p(address),
        ctypes.c_int(_WAIT),
        ctypes.c_uint(value & 0xFFFFFFFF),
        ctypes.byref(limit),
        None,
        ctypes.c_uint(0),
    )


def wake(address: int) -> None:
    """Wakes all who sleep at `address`."""
    _syscall(
        ctypes.c_long(_CALL),
        ctypes.c_void_p(address),
        ctypes.c_int(_WAKE),
        ctypes.c_uint(_ALL),
        None,
        None,
        ctypes.c_uint(0),
    )
