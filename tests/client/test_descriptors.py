"""A process that has no file descriptors left: misses and skipped stores, nothing else, and it goes on afterwards."""

from __future__ import annotations

import json

import pytest

from tests.client.real import Folder

pytestmark = pytest.mark.slow

CODE = """
import attrs, json, resource
from maru_core.errors import MaruError
from maru_core.host import PluginHost
host = PluginHost.with_plugins({}, built_ins=True)
settings = MaruConfig(**SETTINGS)
def connect(**more):
    namespace = Namespace.of({'model': 'test', 'tokens': 256})
    return MaruHandler.connect(attrs.evolve(settings, **more), namespace, host=host)
h = connect()
h.store('a', b'1')
os.listdir('/')
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open('/dev/null', os.O_RDONLY))
except OSError:
    pass
for _ in range(int(sys.argv[1])):
    os.close(taken.pop())
answers = []
def note(call):
    try:
        answers.append(type(call()).__name__)
    except MaruError as error:
        answers.append(type(error).__name__)
    except BaseException as error:
        answers.append(f"raw {type(error).__name__}: {error}")
def elsewhere(*calls):
    def work():
        for call in calls:
            note(call)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
for call in (lambda: h.store('b', b'2'), lambda: h.retrieve('a'), h.ping, h.stats,
             lambda: h.submit_acquire([bytes(32)], leading=True).poll(0.5)):
    elsewhere(call)
note(lambda: h.store('c', b'3'))
note(lambda: connect(connect_timeout=0.5))
for descriptor in taken:
    os.close(descriptor)
end = time.monotonic() + 30
while time.monotonic() < end:
    try:
        found = h.retrieve('a')
        break
    except MaruError:
        time.sleep(0.05)
print(json.dumps([answers, bytes(found.view).decode(), str(h.store('d', b'4'))]), flush=True)
found.close()
h.close()
"""


@pytest.mark.parametrize("left", range(0, 14))
def test_without_descriptors_calls_fail_like_any_other(folder: Folder, left: int) -> None:
    """Whatever the number that is left: no other exception, and above all no abort by a library underneath."""
    settings = folder.settings(request_timeout=0.5, connect_timeout=30)
    process = folder.run(CODE.replace("SETTINGS", repr(settings)), str(left))
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, (process.returncode, err)
    answers, found, stored = json.loads(out.strip().splitlines()[-1])
    assert not [answer for answer in answers if answer.startswith("raw")]
    assert len(answers) == 7
    assert found == "1"
    assert stored == "StoreResult.STORED"
