"""Real engines one after the other in one process, each with other settings of loads and stores.

Run by ``test_knobs.py`` as ``python -m tests.engine.knobs MODEL RUNTIME_DIR [SET…]``; prints a line ``BEGIN SET``
before each engine, and one JSON object with the results of all. One process, because most of an engine's start is
importing what it needs.
"""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.engine import between_steps, tiny

LOAD, STORE, OVERLAP = "maru_async_load", "maru_async_store", "maru_overlap_load_with_compute"
RELEASE, WINDOW = "maru_overlap_release_after_layers", "maru_load_admission_window"
SPARE, LAYERWISE, WORTH = "maru_overlap_spare_decodes", "maru_use_layerwise", "maru_load_or_compute"

ALL = {LOAD: True, STORE: True, OVERLAP: True, RELEASE: 2, SPARE: False, WINDOW: 1, WORTH: "auto"}
FORMER = ("maru_enable_deferred_loading", "maru_enable_write_behind", "maru_enable_layerwise_overlap")

#: Each setting alone and all of them together: so every two of them meet switched on, off, and one without the other.
SETS: dict[str, dict[str, Any]] = {
    "load": {LOAD: True},
    "store": {STORE: True},
    "overlap": {OVERLAP: True},
    "release": {RELEASE: 2},
    "spare": {SPARE: False},
    "window": {WINDOW: 1},
    "layerwise": {LAYERWISE: True},
    "worth": {WORTH: "auto"},
    "load-overlap": {LOAD: True, OVERLAP: True},
    "load-store-window": {LOAD: True, STORE: True, WINDOW: 1},
    "former-names": dict.fromkeys(FORMER, True),
    "all-chunkwise": ALL,
    "all-layerwise": {**ALL, LAYERWISE: True},
}


def preemption(engine: tiny.Tiny) -> dict[str, Any]:
    """The shortest answers with which the cache does not hold all requests."""
    return tiny.preemption(engine, tokens=100)


SUITE = (
    tiny.step_sizes,
    tiny.full_prompts,
    preemption,
    between_steps.failures,
    tiny.aborted_load,
    tiny.parked,
    tiny.reset,
    tiny.figures,
)


def main() -> None:
    """Run the suite with every set, or with those that are named."""
    model, runtime, *names = sys.argv[1:]
    results: dict[str, Any] = {}
    for name in names or SETS:
        print(f"BEGIN {name}", flush=True)
        folder = Path(runtime) / name
        folder.mkdir(0o700)
        settings = SETS[name]
        try:
            engine = tiny.Tiny(model, {**tiny.common(str(folder)), **settings}, {})
            # Together with others the suite is to load; alone, to judge.
            with engine.always_loading() if len(settings) > 1 else nullcontext():
                results[name] = tiny.run(engine, SUITE)
            if WORTH in settings:
                results[name].update(tiny.run(engine, (tiny.worth,)))
            engine.close()
        except Exception:  # noqa: BLE001 - reported as the set's result
            results[name] = {"error": traceback.format_exc()}
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
