"""CXL memory, and any other that the kernel offers as device-DAX: whole devices, mapped by every process.

A device has no size that ``fstat`` knows, it can only be mapped, in whole alignments, never read or written, and its
memory is the same before and after a pool. So ownership is what this module is mostly about: see
:mod:`maru_backends.ownership` for the rules and :mod:`maru_backends.locks` for the proof. A file can stand in for a
device during development and follows the same rules.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog
from attrs import evolve

from maru_backends import devdax, native
from maru_backends.capacity import Available, available_memory
from maru_backends.checkup import check_cxl
from maru_backends.cxl_pool import CxlPool, CxlRegion
from maru_backends.locks import lock_alone, lock_shared, own, unlock
from maru_backends.mapped import check_block, check_geometry, new_descriptor, superblock_of
from maru_backends.origin import Host, place_of
from maru_backends.ownership import Known, OwnerRecord, ended, refusal
from maru_backends.places import Flusher, Place, named_twice, no_room, shares
from maru_core.config import MaruConfig
from maru_core.contracts import BackendProvision, Finding, PoolPlan, PoolRequest, PoolWish, StorageBackend
from maru_core.errors import BackendError
from maru_core.plugin import hookimpl
from maru_core.pool_format import SUPERBLOCK_SIZE, pack_superblock
from maru_core.protocol import PoolDescriptor

NAME: Final = "cxl"
_OWNER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: Seconds that a lock is tried which others hold for a moment only.
_MOMENT: Final = 0.3
#: Seconds that a cold start waits for engines of the former pool to let go of it.
_PATIENCE: Final = 5.0
#: Seconds for which devices of a process that has just died may still move its bytes.
_SETTLE: Final = 1.0
_CLEARED: Final = 1 << 20
_SETTING: Final = "set maru_cxl_pool_path (--cxl-pool-path) to one of them, or to several with commas in between"

#: The helper for hosts that are not coherent, or why there is none.
LoadFlusher = Callable[[], "Flusher | str"]


def load_flusher() -> Flusher | str:
    """The native helper."""
    return native.load() or str(native.why_not())


class CxlBackend:
    """Makes and maps pools on DAX devices. Implements :class:`maru_core.contracts.StorageBackend`."""

    name: Final = NAME

    def __init__(
        self,
        *,
        sysfs: Path = devdax.SYSFS,
        dev: Path = devdax.DEV,
        host: Callable[[], Host] = Host.current,
        flusher: LoadFlusher = load_flusher,
        memory: Callable[[], Available] = available_memory,
        patience: float = _PATIENCE,
        settle: float = _SETTLE,
    ) -> None:
        """Times in seconds: ``patience`` of a cold start with engines of the former pool, ``settle`` after they died.

        ``memory`` tells how much there is to take for a file that stands in for a device.
        """
        self._sysfs = sysfs
        self._dev = dev
        self._host = host
        self._load_flusher = flusher
        self._memory = memory
        self._patience = patience
        self._settle = settle
        self._told: set[str] = set()
        self._log = structlog.get_logger(__name__)

    def plan_pools(self, wish: PoolWish, backends: Callable[[str], StorageBackend]) -> Sequence[PoolPlan]:
        """One pool per device, in the order of the path, each as large as its device until the size is reached."""
        places = [self._find(path, "") for path in self._paths(wish.path)]
        twice = named_twice(places)
        if twice:
            raise BackendError(f"maru_cxl_pool_path is {wish.path!r}, which names {', '.join(twice)} twice")
        if wish.size is None:
            return [PoolPlan(NAME, _whole(place, wish), _path_of(place), wish.size_setting) for place in places]
        sizes = shares(places, wish.size)
        if wish.size - sum(sizes) >= max(place.align for place in places):
            there = Available(sum(sizes), f"the capacity of {', '.join(place.path for place in places)}")
            raise BackendError(no_room(wish.size, there, wish.size_setting))
        if not any(sizes):
            # Refused when it is made, with the alignment.
            return [PoolPlan(NAME, wish.size, _path_of(places[0]), wish.size_setting)]
        pairs = list(zip(places, sizes, strict=True))
        unused = [place.path for place, size in pairs if not size]
        if unused:
            self._log.warning(
                "devices stay unused: the size is reached without them",
                paths=unused,
                size=wish.size,
                remedy=f"raise {wish.size_setting}, or leave them out of maru_cxl_pool_path",
            )
        return [PoolPlan(NAME, size, _path_of(place), wish.size_setting) for place, size in pairs if size]

    def create_pool(self, request: PoolRequest) -> CxlPool:
        """Take a device for ``request.owner`` and write a new pool on it, of whole alignments.

        Raises BackendError when another owner has it, when its memory may still be written by who used it before, or
        when it is too small; says who and what to do.
        """
        place, descriptor, flusher = self._prepare(request)
        with suppress(OSError):
            self._tell(place)
        fd = place.open(make=True)
        try:
            return self._take(place, fd, descriptor, request, flusher)
        except BaseException:
            os.close(fd)
            raise

    def adopt_pool(self, request: PoolRequest) -> CxlPool | None:
        """Take over the pool on a device if its owner was ``request.owner`` in this boot and by this very node."""
        fd = None
        try:
            place, descriptor, flusher = self._prepare(request)
            if not os.path.lexists(place.path):
                return None
            fd = place.open()
            if place.look(fd, flusher).is_free:
                os.close(fd)
                return None
            pool = self._continue(place, fd, descriptor, request, flusher)
        except (OSError, BackendError) as error:
            self._log.info("pool not taken over", path=request.path, reason=str(error))
            if fd is not None:
                os.close(fd)
            return None
        return pool

    def map_region(self, descriptor: PoolDescriptor) -> CxlRegion:
        """Map an existing pool, wherever this host has its device; raises BackendError when it is not to be found."""
        check_geometry(descriptor)
        flusher = self._flusher(descriptor.flush)
        try:
            return self._map_at(descriptor.location, descriptor, flusher)
        except BackendError as error:
            for device in devdax.discover(self._sysfs, self._dev):
                if device.path == descriptor.location or device.problem or device.capacity < descriptor.size:
                    continue
                with suppress(BackendError):
                    return self._map_at(device.path, descriptor, flusher)
            raise error

    def _prepare(self, request: PoolRequest) -> tuple[Place, PoolDescriptor, Flusher | None]:
        """Where the pool of a request is to be and what it will be like; nothing is opened."""
        if not _OWNER.fullmatch(request.owner):
            raise BackendError(
                f"pool owner {request.owner!r} is not a file name: use letters, digits, '.', '_' and '-'"
            )
        paths = self._paths(request.path)
        if len(paths) != 1:
            raise BackendError(f"one pool is on one device, got {request.path!r}")
        place = self._find(paths[0], f"maru-cxl-{request.owner}-{request.pool}")
        size = place.floor(request.size)
        if not size:
            raise BackendError(
                f"a pool of {request.size} bytes cannot hold one granule: {place.path} is used in whole alignments of "
                f"{place.align} bytes; raise {request.size_setting}"
            )
        descriptor = new_descriptor(request, NAME, place.path, size, flush=request.shared_by_hosts)
        return place, descriptor, self._flusher(request.shared_by_hosts)

    def _take(
        self, place: Place, fd: int, descriptor: PoolDescriptor, request: PoolRequest, flusher: Flusher | None
    ) -> CxlPool:
        """Own an open device and make a pool on it; a file that was made for that does not stay when it fails."""
        if not own(fd, _MOMENT):
            raise BackendError(_in_use(place, place.look(fd, flusher)))
        try:
            return self._make(place, fd, descriptor, request, flusher)
        except BaseException:
            if place.device is None and os.fstat(fd).st_size == 0 and place.still_names(fd):
                with suppress(OSError):  # a folder that lets nobody: what failed before is what matters
                    os.unlink(place.path)
            raise

    def _make(
        self, place: Place, fd: int, descriptor: PoolDescriptor, request: PoolRequest, flusher: Flusher | None
    ) -> CxlPool:
        """Prove that nobody writes to a device that is owned, and write a new pool."""
        if not place.still_names(fd):
            raise BackendError(f"{place.path} was removed or replaced while it was taken: start again")
        host, node = self._host(), place_of(fd)
        known = place.look(fd, flusher)
        reason = refusal(known, host, node, request.owner, place.path)
        if reason is not None:
            if not request.take_over:
                raise BackendError(reason)
            self._log.warning("device taken over on the operator's word", path=place.path, before=reason)
        # Held until the new pool is written, so that nobody maps what is neither the old nor the new one.
        if not lock_alone(fd, self._patience):
            raise BackendError(_still_mapped(place, known))
        former = known.record
        if former is not None and (former.state != "released" or former.mapped):
            time.sleep(self._settle)
        place.allocate(fd, descriptor.size, self._memory, request.size_setting)
        region = CxlRegion(descriptor, place.map(fd, descriptor.size), flusher)
        record = OwnerRecord.of_this(request.owner, request.pool, host, node, abroad=request.shared_by_hosts)
        pool = CxlPool(region, fd, place, record, known.sequence)
        try:
            # No lock keeps apart who has another node of the device, or another host: these looks make it unlikely that
            # two start in the same moment without seeing each other.
            if place.look(fd, flusher) != known:
                raise BackendError(_in_use(place, place.look(fd, flusher)))
            # From here on the device is ours, and for now there is no pool on it.
            pool.note(record)
            pool.invalidate()
            if descriptor.flush and former is not None and host.is_this_boot(bytes.fromhex(former.boot_id)):
                # What dead processes of this host wrote may still be in its caches, and would be written back at any
                # later time over what another host stores in the new pool.
                region.write_back(0, descriptor.size)
            _clear(region, descriptor.table_offset, descriptor.data_offset)
            now = place.look(fd, flusher)
            if now.record != record:
                raise BackendError(_in_use(place, now))
            block = superblock_of(descriptor, host.boot, node)
            # Last, so that whoever finds a valid superblock finds a whole pool.
            packed = pack_superblock(block)
            region.buffer[: len(packed)] = packed
            region.write_back(0, SUPERBLOCK_SIZE)
            unlock(fd)
        except BaseException:
            if place.look(fd, flusher).record == record:
                pool.note(ended(record, mapped=False))
            region.close()
            raise
        return pool

    def _continue(
        self, place: Place, fd: int, descriptor: PoolDescriptor, request: PoolRequest, flusher: Flusher | None
    ) -> CxlPool:
        """Own an open device with the pool that is on it; raises BackendError, and has changed nothing then."""
        if not own(fd, _MOMENT):
            raise BackendError("its owner lives")
        host, node = self._host(), place_of(fd)
        known = place.look(fd, flusher)
        record, block = known.record, known.block
        if block is None or record is None:
            raise BackendError("there is no pool, or it does not say whose it is")
        if (record.owner, record.pool) != (request.owner, request.pool):
            raise BackendError(f"it is of {record.describe()}")
        if not host.is_this_boot(block.boot_id) or block.place != node or not place.still_names(fd):
            raise BackendError("it was made before this host was started, or by another node of the device")
        if record.abroad != request.shared_by_hosts:
            raise BackendError("its clients flush caches although the new ones would not, or the other way round")
        if place.capacity is None and os.fstat(fd).st_size != descriptor.size:
            raise BackendError(f"it has {os.fstat(fd).st_size} bytes, {descriptor.size} are asked for")
        found = evolve(descriptor, identity=block.identity)
        check_block(block, found, place.path)
        region = CxlRegion(found, place.map(fd, found.size), flusher)
        pool = CxlPool(region, fd, place, record, known.sequence)
        pool.note(OwnerRecord.of_this(request.owner, request.pool, host, node, abroad=record.abroad))
        return pool

    def _map_at(self, path: str, descriptor: PoolDescriptor, flusher: Flusher | None) -> CxlRegion:
        place = self._find(path, "")
        if place.made:
            raise BackendError(f"{path} is a folder, not a pool")
        fd = place.open()
        try:
            # Held as long as anything of this process maps it, see the module that it is of.
            if not lock_shared(fd, _MOMENT):
                raise BackendError(f"a server is making pool {path} anew: connect again")
            block = place.look(fd, flusher).block
            if block is None:
                raise BackendError(f"there is no pool on {path} (any more): connect again")
            check_block(block, descriptor, path)
            if not descriptor.flush and block.boot_id != self._host().boot:
                raise BackendError(
                    f"pool {path} was made by another host, and its server keeps it for clients on that one only: "
                    f"start the server with maru_visibility=hosts"
                )
            return CxlRegion(descriptor, place.map(fd, descriptor.size), flusher)
        finally:
            os.close(fd)

    def _flusher(self, needed: bool) -> Flusher | None:
        found = self._load_flusher()
        if not isinstance(found, str):
            return found
        if needed:
            raise BackendError(
                f"a pool that hosts share without being coherent needs caches to be flushed: {found} (if only this "
                f"host uses the pool: maru_visibility=host)"
            )
        return None

    def _paths(self, path: str | None) -> list[str]:
        if path is not None:
            return path.split(",")
        devices = devdax.discover(self._sysfs, self._dev)
        usable = [device.path for device in devices if device.problem is None]
        if len(usable) == 1:
            return usable
        count = "no" if not usable else "more than one"
        raise BackendError(
            f"there is {count} DAX device to make a pool of, and none was named: {_SETTING}; {devdax.listed(devices)}"
        )

    def _find(self, path: str, name: str) -> Place:
        return Place.find(path, name, self._sysfs)

    def _tell(self, place: Place) -> None:
        """Once: a file is no device."""
        if place.device is None and place.path not in self._told:
            self._told.add(place.path)
            self._log.warning("a file stands in for a CXL device: for development only", path=place.path)


@hookimpl
def maru_storage_backends() -> Sequence[BackendProvision]:
    """The ``cxl`` backend."""
    summary = "CXL memory: DAX devices, or files that stand in for them"
    return [BackendProvision(NAME, CxlBackend, summary=summary, diagnose=diagnose)]


def diagnose(config: MaruConfig) -> Sequence[Finding]:
    """What ``maru doctor`` says: the devices, and whether hosts that are not coherent could share them."""
    found = load_flusher()
    if isinstance(found, str):
        needed = config.visibility == "hosts"
        native = Finding("error" if needed else "note", "cache flushing", f"pools cannot be shared by hosts: {found}")
    else:
        native = Finding("ok", "cache flushing", "pools can be shared by hosts that are not coherent with each other")
    return [*check_cxl(config), native]


def _path_of(place: Place) -> str:
    """What a plan says: of a file in a folder the folder, as its name depends on who makes it."""
    return os.path.dirname(place.path) if place.made else place.path


def _whole(place: Place, wish: PoolWish) -> int:
    if place.capacity is None:
        raise BackendError(f"no size was given, and {place.path} has none of its own; set {wish.size_setting}")
    if not place.capacity:
        raise BackendError(f"{place.path} is shorter than {place.align} bytes, in which it is used: make it larger")
    return place.capacity


def _clear(region: CxlRegion, start: int, end: int) -> None:
    zero = bytes(_CLEARED)
    for at in range(start, end, _CLEARED):
        region.buffer[at : min(at + _CLEARED, end)] = zero[: min(_CLEARED, end - at)]
    region.write_back(start, end - start)


def _in_use(place: Place, known: Known) -> str:
    who = "a process that does not tell its name" if known.record is None else known.record.describe()
    return f"{place.path} is in use by {who}: stop that, or give this server another device"


def _still_mapped(place: Place, known: Known) -> str:
    former = "" if known.record is None else f" of {known.record.describe()}"
    return (
        f"engines still map the pool{former} on {place.path}, and could write to a new one: stop them, or start the "
        f"server as it was before (same runtime folder, size and granule), which takes the pool over with what is in it"
    )
