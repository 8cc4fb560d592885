"""The warm server: a process that has imported torch once and forks workers from itself.

Importing torch costs more than a second of one core; a fork of a process that has it costs milliseconds. The server
stays single-threaded, so that a fork is safe, and is the parent of all workers: they die with it, and it ends when its
supervisor does. It adopts what workers leave behind (processes that a user's task has started), and ends that too.

Run as `python -m verbund.cluster.warm`, on the supervisor's machine or another; what it needs to know, a secret among
it, comes as one line of JSON on standard input, so that no argument and no variable tells it to others.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    asked = json.loads(sys.stdin.buffer.readline() or b"null")
    if asked is None:
        sys.exit(1)  # the supervisor was killed before it could say anything
    # numpy's BLAS would start a thread per core when it is imported, and a server with threads cannot be forked.
    # OpenMP's threads spin while they wait, which brings work to a halt as soon as somebody else needs a core.
    os.environ.update({**asked["environment"], "GOMP_SPINCOUNT": "2000", **os.environ})
    os.environ.update({"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    if "parent" in asked:
        from verbund.comm.parent import die_with_parent

        die_with_parent(asked["parent"])
    from verbund.cluster.forking import serve

    serve(asked)


if __name__ == "__main__":
    main()
