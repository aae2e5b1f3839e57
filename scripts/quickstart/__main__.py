"""Two vLLM engines share their KV cache through Maru, on the CPU, with a real model. Run by scripts/quickstart.sh.

Exit status: 0 when B's answers equal those without Maru, the reuse really happened and B answered fast enough; 1 when
not, or when something failed; 2 for wrong options; 128 + n when signal n ended it. No process is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In place of the folder of this file: only the standard library is sure to be there.
sys.path[0] = str(ROOT)

from scripts.quickstart import engines  # noqa: E402
from scripts.quickstart.engines import Place  # noqa: E402
from scripts.quickstart.processes import Interrupted, Processes  # noqa: E402
from scripts.quickstart.progress import Failed, Progress  # noqa: E402
from scripts.quickstart.report import as_json, table  # noqa: E402
from scripts.quickstart.run import Run, about  # noqa: E402


@contextmanager
def place_for(python: str, cache: Path) -> Iterator[Place]:
    """Private folders of one run; those for sockets and pools go with it, whatever happens."""
    logs = cache / "quickstart" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    logs.mkdir(parents=True)
    # Short: the path of a Unix socket has 107 bytes at most.
    runtime = Path(tempfile.mkdtemp(prefix="maru-quickstart-", dir="/tmp"))
    pools: Path | None = None
    try:
        shared = Path("/dev/shm")
        roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * engines.POOL_BYTES
        # Containers often have 64 MB there; a plain file does for this once. Another name than Maru's own folders have:
        # any server that starts removes those that are empty.
        pools = Path(tempfile.mkdtemp(prefix="quickstart-pool-", dir=shared if roomy else runtime))
        yield Place(ROOT, python, logs, runtime, pools, engines.usable_cpus())
    finally:
        for folder in filter(None, (pools, runtime)):
            shutil.rmtree(folder, ignore_errors=True)


def execute(run: Run, place: Place, target: Path | None, interpreter: str | None) -> bool:
    """All steps; prints the table and says whether everything holds."""
    if interpreter is not None:
        run.environment(interpreter)
    model = run.model()
    api, children = run.start(model)
    prompts = run.guarded(children, run.fit, api["plain"])
    reference = run.guarded(children, run.reference, api["plain"], prompts)
    run.stop(children.pop("plain"))
    rows, cold, checks = run.guarded(children, run.measure, api, prompts, reference)
    print()
    for line in table(rows, cold):
        print(line)
    print()
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
    report = as_json(rows, checks, cold, about(place, prompts))
    if target is not None:
        target.write_text(json.dumps(report, indent=1) + "\n")
    return bool(report["passed"])


def main(arguments: Sequence[str]) -> int:
    """Parse, run, clean up."""
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table and the checks to this file, too")
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs of a successful run")
    parser.add_argument("--python", metavar="PATH", help="use this environment instead of making .venv")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    cache = Path(os.environ.get("MARU_CACHE") or ROOT / ".cache").absolute()
    progress = Progress(sys.stderr)
    python = options.python or str(ROOT / ".venv/bin/python")
    passed = False
    try:
        # The folders outlive the processes that use them.
        with place_for(python, cache) as place, Processes() as processes:
            progress.step(f"logs are in {place.logs}")
            run = Run(place, processes, progress)
            try:
                passed = execute(run, place, options.json, None if options.python else sys.executable)
            except Interrupted as signal:
                progress.step(f"{signal}: ending all processes (once more: at once)")
                raise
            progress.step("ending all processes")
    except Interrupted as signal:
        progress.step(f"{signal}: everything was ended; logs are in {place.logs}")
        return 128 + signal.number
    except (Failed, OSError) as error:
        progress.step(f"FAILED: {error}")
        return 1
    if passed and not options.keep_logs:
        shutil.rmtree(place.logs)
        progress.step("done: B took the document from the pool and answered as without Maru")
    else:
        progress.step(f"{'done' if passed else 'FAILED: see above'}; logs are in {place.logs}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
