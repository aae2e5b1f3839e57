"""``python -m tests.chaos.nursery``: forks client programs, which start in milliseconds because all is imported.

Reads one JSON object per line (the fields of :class:`tests.chaos.client.Plan`) and answers each with a process id. Its
clients end with it, and it ends with its standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback

from tests.chaos.client import Plan, run

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Fork until the input ends."""
    # The kernel reaps children then.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1):
                os.dup2(nothing, descriptor)
            status = 1
            try:
                run(Plan(**json.loads(line)))
                status = 0
            except BaseException:  # noqa: BLE001 - the process ends here
                traceback.print_exc()
            finally:
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
