"""``python -m scripts.vm build`` builds the machines; ``run COMMAND`` boots one and carries out a command in it.

Exit code 77: they cannot be built on this host, and the last line says why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from scripts.vm.guest import Device, GuestError, running
from scripts.vm.image import prepared
from scripts.vm.packages import NotRun

NOT_RUN = 77
#: Makes devices of namespaces that have not been any yet.
MAKE_DEVICES = (
    "for n in 0 1; do [ -e /sys/bus/nd/devices/namespace$n.0 ] && [ ! -e /dev/dax$n.0 ] && "
    "ndctl create-namespace --force --mode=devdax --align=2M --reconfig=namespace$n.0 >/dev/null; done; ls /dev/dax*"
)


def main() -> int:
    """Build, or build and run."""
    parser = argparse.ArgumentParser(prog="python -m scripts.vm", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build", help="build what is not built yet")
    run = verbs.add_parser("run", help="boot a guest with /dev/dax0.0 and /dev/dax1.0 and carry out a command")
    run.add_argument("command", help="for bash, in the checkout")
    run.add_argument("--timeout", type=float, default=300.0, help="seconds [default: 300]")
    chosen = parser.parse_args()
    try:
        with prepared() as image:
            if chosen.verb == "build":
                print(image.folder)
                return 0
            with tempfile.TemporaryDirectory(prefix="maru-vm-") as scratch:
                devices = [Device.make(Path(scratch) / f"memory-{number}", 256 << 20) for number in range(2)]
                with running(image, Path(scratch) / "guest", "guest", devices) as guest:
                    guest.run(MAKE_DEVICES)
                    job = guest.start(chosen.command)
                    sys.stdout.write(job.wait(chosen.timeout, code=None))
                    return job.code or 0
    except NotRun as reason:
        print(f"not run: {reason}")
        return NOT_RUN
    except GuestError as error:
        print(f"vm: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
