"""Running guests: one process of the emulator each, and jobs that a guest carries out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import define, frozen

from scripts.vm.image import Image

#: Label area of a device, bytes: what is written there makes it a device-DAX again at the next boot.
LABEL: Final = 2 << 20
#: The kernel takes sizes without the label in multiples of this.
STEP: Final = 16 << 20
#: Seconds that a guest has to boot; 20 to 30 are usual on two quiet cores.
BOOT: Final = 240.0
_POLL: Final = 0.1


class GuestError(Exception):
    """A guest died, or did not do in time what it should; the message ends with its last output."""


@frozen
class Device:
    """A file that guests see as a memory device."""

    path: Path
    #: Bytes with the label.
    size: int

    @classmethod
    def make(cls, path: Path, size: int) -> Device:
        """A new one of ``size`` usable bytes, a multiple of 16 MiB. Takes disk space only as it is written."""
        if size % STEP:
            raise ValueError(f"size is {size}; the kernel takes multiples of {STEP} bytes")
        with path.open("xb") as file:
            file.truncate(size + LABEL)
        return cls(path, size + LABEL)


@define
class Job:
    """A command that runs in a guest, or has ended. ``stem``: its files without their endings."""

    guest: Guest
    command: str
    stem: Path

    @property
    def output(self) -> str:
        """What it printed so far."""
        try:
            return self.stem.with_suffix(".out").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def code(self) -> int | None:
        """Its exit code; ``None`` while it runs."""
        try:
            return int(self.stem.with_suffix(".rc").read_text())
        except FileNotFoundError:
            return None

    def kill(self) -> None:
        """End it and all that it started, at once."""
        self.guest.run(f"kill -KILL -- -$(cat /jobs/{self.stem.name}.pid)")

    def wait(self, seconds: float, *, code: int | None = 0) -> str:
        """Its output once it has ended; raises GuestError when it takes longer or ends otherwise than with ``code``.

        With ``code`` ``None`` any exit code will do.
        """
        self.guest.until(lambda: self.code is not None, seconds, f"{self.command!r} did not end", self)
        if code is not None and self.code != code:
            raise GuestError(f"{self.guest.name}: {self.command!r} ended with {self.code}, not {code}:\n{self.output}")
        return self.output

    def says(self, text: str, seconds: float) -> str:
        """Its output once ``text`` is in it; raises GuestError when it ends before, or takes longer."""

        def said() -> bool:
            # The code first: what is printed last must not be missed.
            ended = self.code is not None
            if text in self.output:
                return True
            if ended:
                raise GuestError(f"{self.guest.name}: {self.command!r} ended without saying {text!r}:\n{self.output}")
            return False

        self.guest.until(said, seconds, f"{self.command!r} did not say {text!r}", self)
        return self.output


@define
class Guest:
    """One virtual machine that runs. Made by :func:`running`."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    _jobs: int = 0

    @property
    def console(self) -> str:
        """What the kernel and its first process printed."""
        return (self.folder / "console").read_text(errors="replace")

    def start(self, command: str) -> Job:
        """Let a shell in the guest carry out ``command``, in the checkout; does not wait."""
        self._jobs += 1
        stem = self.folder / "jobs" / f"{self._jobs:03}"
        written = stem.with_suffix(".new")
        # Of a session of its own, see agent.sh.
        written.write_text(f"echo $$ >/jobs/{stem.name}.pid\n{command}\n")
        written.rename(stem.with_suffix(".job"))
        return Job(self, command, stem)

    def run(self, command: str, seconds: float = 120.0, *, code: int | None = 0) -> str:
        """Like :meth:`start`, and :meth:`Job.wait`; what takes too long is killed."""
        job = self.start(command)
        try:
            return job.wait(seconds, code=code)
        except BaseException:
            if job.code is None and self.process.poll() is None:
                job.kill()
            raise

    def until(self, done: Callable[[], bool], seconds: float, otherwise: str, job: Job | None = None) -> None:
        """Wait until ``done()``; raises GuestError when the guest dies or it takes longer."""
        end = time.monotonic() + seconds
        while not done():
            dead, late = self.process.poll() is not None, time.monotonic() > end
            if (dead or late) and not done():
                tail = "\n".join((self.console if job is None or dead else job.output).splitlines()[-30:])
                why = "the machine has ended" if dead else f"{otherwise} within {seconds:.0f} s"
                raise GuestError(f"{self.name}: {why}:\n{tail}")
            time.sleep(_POLL)

    def kill(self) -> None:
        """As a power cut would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def running(
    image: Image,
    folder: Path,
    name: str,
    devices: Sequence[Device] = (),
    *,
    address: str = "",
    peer: str = "",
    memory: int = 1024,
) -> Iterator[Guest]:
    """Boot a guest and end it whatever happens.

    ``folder`` is for its files. ``address`` (with prefix length) gives it an interface on a wire to the guest called
    ``peer`` below the same parent folder. ``memory`` is in MiB. Raises GuestError when it does not boot.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "jobs").mkdir(parents=True)
    # The same at each boot, and no other guest's: by these a host is known.
    identity = uuid.uuid5(uuid.NAMESPACE_DNS, f"{name}.maru.test")
    (folder / "jobs" / "settings").write_text(f"NAME={name}\nMACHINE={identity.hex}\nADDRESS={address}\n")
    tools = image.tools
    arguments = [
        # Ended by the kernel with the process that runs the tests, however that ends.
        *("setpriv", "--pdeathsig", "KILL"),
        *(
            str(tools.path("qemu-system-x86_64")),
            "-nodefaults",
            "-uuid",
            str(identity),
            "-no-reboot",
            "-display",
            "none",
        ),
        *("-accel", "tcg,thread=multi", "-cpu", "max,la57=off", "-smp", "1"),
        *("-machine", "q35,nvdimm=on", "-m", f"{memory}M,slots={max(1, len(devices))},maxmem=8G"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initramfs)),
        *("-append", "console=ttyS0 quiet panic=-1 rdinit=/opt/maru/scripts/vm/agent.sh"),
        *("-serial", f"file:{folder / 'console'}"),
        *("-virtfs", f"local,path={folder / 'jobs'},mount_tag=jobs,security_model=none,multidevs=remap"),
        *("-device", "virtio-rng-pci"),
    ]
    for data in tools.data("share/qemu", "share/seabios", "lib/ipxe/qemu"):
        arguments += ["-L", str(data)]
    for number, device in enumerate(devices):
        arguments += [
            *("-object", f"memory-backend-file,id=m{number},share=on,mem-path={device.path},size={device.size}"),
            *("-device", f"nvdimm,id=n{number},memdev=m{number},label-size={LABEL}"),
        ]
    if address:
        wire = folder.parent
        local, remote = wire / f"{name}.wire", wire / f"{peer}.wire"
        local.unlink(missing_ok=True)
        mac = f"52:54:00:00:00:{int(address.split('/')[0].rsplit('.', 1)[1]):02x}"
        arguments += [
            "-netdev",
            f"dgram,id=w,local.type=unix,local.path={local},remote.type=unix,remote.path={remote}",
            *("-device", f"virtio-net-pci,netdev=w,mac={mac},romfile="),
        ]
    with (folder / "emulator.log").open("wb") as log:
        process = subprocess.Popen(
            arguments,
            env={**os.environ, **tools.environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    guest = Guest(name, folder, process)
    try:
        up = folder / "jobs" / "up"
        try:
            guest.until(up.exists, BOOT, "did not boot")
        except GuestError as error:
            raise GuestError(f"{error}\n{(folder / 'emulator.log').read_text(errors='replace')}") from error
        yield guest
    finally:
        guest.kill()
