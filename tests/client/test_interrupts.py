"""Exceptions that signal handlers raise in the middle of a batch: whatever it had taken is given back."""

from __future__ import annotations

import json

import pytest

from tests.client.real import Folder

pytestmark = pytest.mark.slow

CODE = """
import json, random, gc
from maru_core.errors import Unavailable
class Interrupted(BaseException):
    pass
def ring(*_):
    raise Interrupted
sys.unraisablehook = lambda _: None
h = connect()
data = [b'x' * 100] * 4
signal.signal(signal.SIGALRM, ring)
chance = random.Random(sys.argv[1])
turn = 0
def store():
    h.batch_store([f'{turn}-{n}' for n in range(4)], data)
def retrieve():
    found = h.batch_retrieve(['a', 'b', 'c', 'd'])
    found = None
h.batch_store(['a', 'b', 'c', 'd'], data)
call = {'store': store, 'retrieve': retrieve}[sys.argv[1]]
begin = time.perf_counter()
for turn in range(50):
    call()
usual = (time.perf_counter() - begin) / 50
interrupted = 0
end = time.monotonic() + 5
# However slow the machine: often enough to hit every place.
while time.monotonic() < end or (interrupted <= 200 and time.monotonic() < end + 60):
    turn += 1
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.05, 1.0) * usual)
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        interrupted += 1
    except Unavailable:  # more was given up than the server has undone yet
        time.sleep(0.01)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
gc.collect()
holdings = h._link.holdings
end = time.monotonic() + 30
while time.monotonic() < end and (h.stats()['pools'][0]['reserved'] or holdings._writing or holdings._reading):
    time.sleep(0.05)
pages = h.stats()['pools'][0]['reserved'] // 4096
print(json.dumps([interrupted, pages, len(holdings._writing), len(holdings._reading)]), flush=True)
"""


@pytest.mark.parametrize("call", ["store", "retrieve"])
def test_an_interrupted_batch_gives_back_what_it_took(folder: Folder, call: str) -> None:
    """Also when the exception comes just after a reply was read and before its result has a name."""
    process = folder.run(CODE, call)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    interrupted, pages, writing, reading = json.loads(out.strip().splitlines()[-1])
    assert interrupted > 200, err
    assert (pages, writing, reading) == (0, 0, 0)
