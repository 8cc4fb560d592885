"""The command `verbund`, also as `python -m verbund`: Ctrl-C and SIGTERM end it with one line, wherever it is."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from verbund.interrupts import Interrupts


def main() -> NoReturn:
    """Runs the command. Its modules are imported only now: that takes a while, and may be interrupted too."""
    status = 0
    with Interrupts(ending=True) as interrupts:
        try:
            from verbund.cli import main as command

            command()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            # Whatever an interrupt has become on its way through others' code, it was one.
            if not interrupts.count:
                raise
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # all is over
    if interrupts.count and status != 130:
        print("verbund: interrupted", file=sys.stderr, flush=True)  # noqa: T201
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
