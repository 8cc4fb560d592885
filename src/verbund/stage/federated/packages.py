"""Packages that privacy and secure aggregation need, and that are no part of a plain installation."""

from __future__ import annotations

from importlib.util import find_spec

from verbund.errors import InputError
from verbund.job import Job


def check(job: Job) -> None:
    """Whether what a job protects itself with is installed.

    Raises:
        InputError: if not.
    """
    exchange = job.strategy.exchange
    if not exchange.protected and exchange.privacy.kind == "none":
        return
    needed = {"cryptography": "cryptography", "dp_accounting": "dp-accounting"}
    if missing := [package for module, package in needed.items() if find_spec(module) is None]:
        raise InputError(
            f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            where=f"strategy.exchange.{'secure' if exchange.privacy.kind == 'none' else 'privacy'}",
            fix="pip install 'verbund[federated]'",
        )
