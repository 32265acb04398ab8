# SPDX-License-Identifier: Apache-2.0
"""What the conformance suite cannot ask of every device: NIXL's own ways of failing, waiting and being absent."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading

import pytest

from kvdisk.device import nixl, nixl_ring
from kvdisk.device.base import Op, Transfer
from kvdisk.device.nixl import NixlDevice
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.device_conformance import WAIT_S, fill, make_memory


@pytest.fixture
def fd(tmp_path):
    number = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    yield number
    os.close(number)


@pytest.fixture
def device(fd):
    made = NixlDevice()
    made.attach_file(fd)
    yield made
    made.close()


@pytest.fixture
def pipe(device):
    """A read of it hangs until something is written."""
    reader, writer = direct_pipe()
    device.attach_file(reader)
    yield reader, writer
    os.write(writer, bytes(ALIGNMENT))  # or closing the device would wait for ever
    device.close()
    os.close(reader)
    os.close(writer)


def direct_pipe():
    """Return a pipe of packets, which O_DIRECT makes of it; it also lets NIXL have the end that is read."""
    reader, writer = os.pipe2(os.O_DIRECT)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_DIRECT)
    return reader, writer


def known(device, byte_count):
    memory = make_memory(byte_count)
    device.attach_memory(memory)
    return memory


def run(device, op, *batch):
    device.submit(op, batch)
    (outcome,) = device.drain()
    return outcome.errors


def blocks(memory):
    return [memory[start : start + ALIGNMENT] for start in range(0, len(memory), ALIGNMENT)]


def went_through_nixl_alone(device):
    return device._posix is None


def in_child(program, **environment):
    """Run a program; return what it printed. It must end well and be silent otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_batches_go_through_nixl_and_nothing_else(device, fd):
    memory = known(device, 8 * ALIGNMENT)
    data = fill(memory, 1)
    assert run(device, Op.WRITE, Transfer(fd, 0, (memory,))) == {}
    memory[:] = bytes(len(memory))
    assert (
        run(device, Op.READ, *(Transfer(fd, at * ALIGNMENT, (view,)) for at, view in enumerate(blocks(memory)))) == {}
    )
    assert memory == data
    assert went_through_nixl_alone(device)


def test_a_file_that_was_truncated_fails_what_lies_beyond_its_end(device, fd):
    memory = known(device, 4 * ALIGNMENT)
    data = fill(memory, 1)
    assert run(device, Op.WRITE, Transfer(fd, 0, (memory,))) == {}
    os.ftruncate(fd, 2 * ALIGNMENT)
    memory[:] = bytes(len(memory))
    first, second, _, _ = blocks(memory)
    found = run(
        device,
        Op.READ,
        Transfer(fd, 0, (first,)),
        Transfer(fd, ALIGNMENT, (memory[2 * ALIGNMENT :],)),
        Transfer(fd, ALIGNMENT, (second,)),
        Transfer(fd, 3 * ALIGNMENT, (memory[3 * ALIGNMENT :],)),
    )
    assert found == {1: errno.EIO, 3: errno.EIO}
    assert memory[: 2 * ALIGNMENT] == data[: 2 * ALIGNMENT]


def test_a_device_that_has_failed_goes_on(device, fd):
    memory = known(device, ALIGNMENT)
    data = fill(memory, 1)
    assert run(device, Op.WRITE, Transfer(fd, 0, (memory,))) == {}
    for _ in range(20):
        assert run(device, Op.READ, Transfer(fd, 7 * ALIGNMENT, (memory,))) == {0: errno.EIO}
        memory[:] = bytes(len(memory))
        assert run(device, Op.READ, Transfer(fd, 0, (memory,))) == {}
        assert memory == data


def test_failed_and_good_batches_in_flight_together_keep_to_themselves(device, fd):
    memory = known(device, 64 * ALIGNMENT)
    data = fill(memory, 1)
    assert run(device, Op.WRITE, Transfer(fd, 0, (memory,))) == {}
    memory[:] = bytes(len(memory))
    expected = {}
    for at, view in enumerate(blocks(memory)):
        beyond = 64 * ALIGNMENT if at % 3 == 0 else 0
        ticket = device.submit(Op.READ, [Transfer(fd, at * ALIGNMENT + beyond, (view,))])
        expected[ticket] = {0: errno.EIO} if beyond else {}
    assert dict(device.drain()) == expected
    for at, view in enumerate(blocks(memory)):
        assert view == (bytes(ALIGNMENT) if at % 3 == 0 else data[at * ALIGNMENT : (at + 1) * ALIGNMENT])


def test_a_limit_of_file_size_fails_the_transfers_beyond_it(tmp_path):
    program = f"""
import os, resource
from kvdisk.device.base import Op, Transfer
from kvdisk.device.nixl import NixlDevice
from kvdisk.testing.device_conformance import fill, make_memory
fd = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
os.posix_fallocate(fd, 0, 8 * 4096)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 4096, 3 * 4096))
device, memory = NixlDevice(), make_memory(4 * 4096)
data = fill(memory, 1)
device.attach_memory(memory)
device.attach_file(fd)
device.submit(Op.WRITE, [
    Transfer(fd, 0, (memory[:4096],)),
    Transfer(fd, 2 * 4096, (memory[:8192],)),
    Transfer(fd, 4 * 4096, (memory[4096:8192],)),
    Transfer(fd, 4096, (memory[4096:8192],)),
])
(outcome,) = device.drain()
print(sorted(outcome.errors.items()))
assert os.pread(os.open({str(tmp_path / "file")!r}, os.O_RDONLY), 8192, 0) == data[:8192]
device.close()
"""
    assert in_child(program).strip() == str([(1, errno.EFBIG), (2, errno.EFBIG)])


def test_a_descriptor_that_was_closed_behind_the_device_is_its_errno(device, tmp_path):
    closed = os.open(tmp_path / "closed", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    device.attach_file(closed)
    os.close(closed)
    assert run(device, Op.WRITE, Transfer(closed, 0, (known(device, ALIGNMENT),))) == {0: errno.EBADF}


def test_more_than_a_ring_holds(device, fd):
    count = 3 * nixl_ring.POOL
    memory = known(device, count * ALIGNMENT)
    data = fill(memory, 2)
    views = blocks(memory)
    half = count // 2
    tickets = [device.submit(Op.WRITE, [Transfer(fd, at * ALIGNMENT, (views[at],)) for at in range(half)])]
    tickets += [device.submit(Op.WRITE, [Transfer(fd, at * ALIGNMENT, (views[at],))]) for at in range(half, count)]
    outcomes = device.drain()
    assert sorted(outcome.ticket for outcome in outcomes) == tickets
    assert not any(outcome.errors for outcome in outcomes)
    memory[:] = bytes(len(memory))
    assert run(device, Op.READ, Transfer(fd, 0, (memory,))) == {}
    assert memory == data
    assert went_through_nixl_alone(device)


def test_close_waits_for_batches_in_flight(tmp_path):
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    device = NixlDevice()
    device.attach_file(fd)
    memory = known(device, 256 * ALIGNMENT)
    data = fill(memory, 3)
    for at, view in enumerate(blocks(memory)):
        device.submit(Op.WRITE, [Transfer(fd, at * ALIGNMENT, (view,))])
    device.close()
    memory[:] = bytes(len(memory))
    os.close(fd)
    assert path.read_bytes() == data


def test_a_file_under_the_number_of_a_detached_one(device, tmp_path):
    memory = known(device, ALIGNMENT)
    for seed in range(3):
        path = tmp_path / str(seed)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        device.attach_file(fd)
        data = fill(memory, seed)
        assert run(device, Op.WRITE, Transfer(fd, 0, (memory,))) == {}
        device.detach_file(fd)
        os.close(fd)
        assert path.read_bytes() == data
    assert went_through_nixl_alone(device)


def test_memory_at_the_addresses_of_memory_given_back(device, fd):
    for seed in range(8):
        mapping = mmap.mmap(-1, (2 + seed % 3) * ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with memoryview(mapping) as memory:
            device.attach_memory(memory)
            data = fill(memory, seed)
            assert run(device, Op.WRITE, Transfer(fd, 0, (memory,))) == {}
            memory[:] = bytes(len(memory))
            assert run(device, Op.READ, Transfer(fd, 0, (memory,))) == {}
            assert memory == data
        mapping.close()  # BufferError while any view of it is left
    assert went_through_nixl_alone(device)


def test_a_transfer_that_hangs_holds_up_no_other(device, fd, pipe):
    """Neither of another drive nor of its own; all pipes are on one."""
    memory = known(device, 4 * ALIGNMENT)
    hung, read, written, _ = blocks(memory)
    reader, writer = direct_pipe()
    device.attach_file(reader)
    late = device.submit(Op.READ, [Transfer(pipe[0], 0, (hung,))])
    os.write(writer, b"x" * ALIGNMENT)
    other = device.submit(Op.READ, [Transfer(reader, 0, (read,))])
    assert device.poll(WAIT_S) == [(other, {})]
    file = device.submit(Op.WRITE, [Transfer(fd, 0, (written,))])
    assert device.poll(WAIT_S) == [(file, {})]
    assert device.poll() == []
    os.write(pipe[1], b"y" * ALIGNMENT)
    assert device.poll(WAIT_S) == [(late, {})]
    assert (bytes(hung[:1]), bytes(read[:1])) == (b"y", b"x")
    device.detach_file(reader)
    os.close(reader)
    os.close(writer)


class Waits:
    """A clock that stands still but for the device's waits, which end at once and are noted in seconds."""

    def __init__(self):
        self.now_s, self.noted_s = 1000.0, []

    def monotonic(self):
        return self.now_s

    def sleep(self, wait_s):
        self.noted_s.append(wait_s)
        self.now_s += wait_s

    def poll(self, wait_ms):
        self.sleep(wait_ms / 1000)


@pytest.fixture
def waits(device, monkeypatch):
    made = Waits()
    monkeypatch.setattr(nixl, "time", made)
    return made


def test_it_waits_in_few_long_turns(device, pipe, waits, monkeypatch):
    device.submit(Op.READ, [Transfer(pipe[0], 0, (known(device, ALIGNMENT),))])
    monkeypatch.setattr(device, "_poller", waits)
    assert device.poll(0.4) == []
    assert waits.now_s - 1000.0 == pytest.approx(0.4, abs=0.0011)
    assert len(waits.noted_s) <= 81, "it spins"


@pytest.mark.parametrize("timeout_s", [0.0003, 0.001, 0.003])
def test_a_short_wait_is_short(device, pipe, waits, monkeypatch, timeout_s):
    device.submit(Op.READ, [Transfer(pipe[0], 0, (known(device, ALIGNMENT),))])
    monkeypatch.setattr(device, "_poller", waits)
    assert device.poll(timeout_s) == []
    assert timeout_s <= waits.now_s - 1000.0 + 1e-9 <= timeout_s + 0.0005


def test_a_wait_ends_when_the_transfer_does(device, pipe, monkeypatch):
    """Were it not woken, it would sleep until it has waited too long."""
    monkeypatch.setattr(nixl, "_LONGEST_SLEEP_S", 2 * WAIT_S)
    ticket = device.submit(Op.READ, [Transfer(pipe[0], 0, (known(device, ALIGNMENT),))])
    real, waiting = device._poller, threading.Event()

    class Watched:
        def poll(self, wait_ms):
            waiting.set()
            return real.poll(wait_ms)

    def end():
        assert waiting.wait(WAIT_S)
        os.write(pipe[1], bytes(ALIGNMENT))

    monkeypatch.setattr(device, "_poller", Watched())
    thread = threading.Thread(target=end)
    thread.start()
    assert device.poll(WAIT_S) == [(ticket, {})]
    thread.join()


def test_it_does_without_the_descriptor_of_the_ring(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl_ring, "ring_fds", set)
    device = NixlDevice()
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    device.attach_file(fd)
    memory = known(device, 4 << 20)
    data = fill(memory, 4)
    ticket = device.submit(Op.WRITE, [Transfer(fd, 0, (memory,))])
    assert device.poll(WAIT_S) == [(ticket, {})]
    device.close()
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == data


def test_nothing_is_left_of_a_closed_device():
    before = nixl_ring.ring_fds()
    devices = [NixlDevice() for _ in range(3)]
    assert len(nixl_ring.ring_fds() - before) == 3
    for device in devices:
        device.close()
    assert nixl_ring.ring_fds() == before


def test_a_package_that_is_missing_is_one_sentence(monkeypatch):
    for name in nixl_ring._PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"^device 'nixl' needs the package nixl-cu13, as in: pip install .*\.$"):
        NixlDevice()


def test_a_package_that_does_not_load_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "nixl_cu13.py").write_text("raise OSError('libcudart.so.13:\\n no such file')")
    for name in [name for name in sys.modules if name.split(".")[0] in nixl_ring._PACKAGES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^device 'nixl' cannot be loaded: libcudart.so.13: no such file\.$"):
        NixlDevice()


class ForgetfulRing(nixl_ring.Ring):
    """A NIXL that takes short reads for whole ones, as before 1.5.1."""

    def take_ended(self):
        return ((piece, True) for piece, _ in super().take_ended())


class DeafRing(nixl_ring.Ring):
    """A ring that is made and then moves nothing."""

    def begin(self, piece):
        return False


@pytest.mark.parametrize(("ring", "said"), [(ForgetfulRing, "a newer nixl"), (DeafRing, "cannot use io_uring")])
def test_a_ring_that_fails_its_trial_is_one_sentence(monkeypatch, ring, said):
    monkeypatch.setattr(nixl, "Ring", ring)
    with pytest.raises(ConfigError, match=rf"^device 'nixl' .*{said}.*\.$"):
        NixlDevice()


REFUSE_IO_URING = """
import ctypes, errno
class Step(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint)]
class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("steps", ctypes.POINTER(Step))]
def refuse(call):  # io_uring_setup 425, io_uring_enter 426, with EPERM
    load, same = Step(0x20, 0, 0, 0), Step(0x15, 0, 1, call)
    steps = (Step * 4)(load, same, Step(6, 0, 0, 0x50000 | errno.EPERM), Step(6, 0, 0, 0x7FFF0000))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Filter(4, steps)), 0, 0) == 0
"""


@pytest.mark.parametrize("call", [425, 426])
def test_a_container_that_forbids_io_uring_is_one_sentence(call):
    program = f"""{REFUSE_IO_URING}
refuse({call})
from kvdisk.device.nixl import NixlDevice
from kvdisk.errors import ConfigError
try:
    NixlDevice()
except ConfigError as error:
    print(error)
"""
    said = in_child(program)
    assert said.startswith("device 'nixl' cannot use io_uring here")
    assert said.count("\n") == 1


def test_it_says_nothing_and_leaves_the_logging_of_others_alone(tmp_path):
    """Not even on an error; and a file that others log to stays open."""
    program = f"""
import logging, os
logging.basicConfig(filename={str(tmp_path / "log")!r}, filemode="w", level=logging.INFO)
environment = dict(os.environ)
from kvdisk.device.base import Op, Transfer
from kvdisk.device.nixl import NixlDevice
from kvdisk.testing.device_conformance import make_memory
fd = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
device, memory = NixlDevice(), make_memory(4096)
device.attach_memory(memory)
device.attach_file(fd)
device.submit(Op.READ, [Transfer(fd, 0, (memory,))])
assert device.drain()[0].errors
device.close()
assert logging.raiseExceptions
assert dict(os.environ) == environment
logging.info("still here")
"""
    assert in_child(program) == ""
    assert "still here" in (tmp_path / "log").read_text()


def test_files_and_memory_come_and_go_while_a_batch_is_under_way(device, fd, pipe):
    memory = known(device, 2 * ALIGNMENT)
    hung, mine = blocks(memory)
    late = device.submit(Op.READ, [Transfer(pipe[0], 0, (hung,))])
    for seed in range(5):
        other = direct_pipe()
        device.attach_file(other[0])  # on the drive of the one that hangs
        more = known(device, (1 + seed) * ALIGNMENT)
        device.detach_file(other[0])
        for end in other:
            os.close(end)
        data = fill(more, seed)
        device.submit(Op.WRITE, [Transfer(fd, 0, (more,))])
        assert device.poll(WAIT_S)[0].errors == {}
        device.submit(Op.READ, [Transfer(fd, 0, (mine,))])
        assert device.poll(WAIT_S)[0].errors == {}
        assert mine == data[:ALIGNMENT]
    os.write(pipe[1], b"z" * ALIGNMENT)
    assert device.poll(WAIT_S) == [(late, {})]
    assert bytes(hung) == b"z" * ALIGNMENT
    assert went_through_nixl_alone(device)
