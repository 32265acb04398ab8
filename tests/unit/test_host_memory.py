# SPDX-License-Identifier: Apache-2.0
"""The memory that a process may take is the least limit of all groups around it, on made trees of
``/proc`` and ``/sys`` and on a real one; and all ranks of a host count against it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvdisk.assembly import check_sizes
from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.worker.host_memory import MACHINE, Deployment, HostMemory, check_host_memory, free_memory_bytes, host_memory

MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
GIB = 1 << 30
VERSION_2 = "30 23 0:26 {root} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
VERSION_1 = "36 25 0:33 {root} {point} rw,nosuid - cgroup cgroup rw,memory"
OTHER_1 = "35 25 0:32 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct"
V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
NONE_1 = 9223372036854771712


def tree(place: Path, own: str, mounts: str, files: Mapping[str, object]) -> Path:
    """Make ``/proc/self`` and groups' files below a directory."""
    texts = {"/proc/self/cgroup": own, "/proc/self/mountinfo": "22 1 0:21 / /proc rw - proc proc rw\n" + mounts}
    for name, text in (texts | dict(files)).items():
        file = place / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return place


@pytest.mark.parametrize(
    ("own", "mounts", "files", "limit_bytes"),
    [
        # The own group, those above it, and the root of a container, which has limits of its own.
        ("0::/a/b", VERSION_2.format(root="/", point=V2), {f"{V2}/a/b/memory.max": GIB}, GIB),
        (
            "0::/a/b/c",
            VERSION_2.format(root="/", point=V2),
            {f"{V2}/a/b/c/memory.max": "max", f"{V2}/a/b/memory.max": 2 * GIB, f"{V2}/a/memory.max": 3 * GIB},
            2 * GIB,
        ),
        ("0::/", VERSION_2.format(root="/", point=V2), {f"{V2}/memory.max": GIB}, GIB),
        ("0::/a", VERSION_2.format(root="/", point=V2), {f"{V2}/a/memory.max": "max"}, None),
        ("0::/a", VERSION_2.format(root="/", point=V2), {f"{V2}/a/memory.max": 1 << 60}, None),
        # Without a namespace of groups a container is mounted at its own.
        ("0::/docker/x/y", VERSION_2.format(root="/docker/x", point=V2), {f"{V2}/y/memory.max": GIB}, GIB),
        ("0::/docker/x", VERSION_2.format(root="/docker/x", point=V2), {f"{V2}/memory.max": GIB}, GIB),
        # The group is beside what is mounted: what is mounted is what there is to see.
        ("0::/../other", VERSION_2.format(root="/", point=V2), {f"{V2}/memory.max": GIB}, GIB),
        ("0::/", VERSION_2.format(root="/..", point=V2), {f"{V2}/memory.max": GIB}, GIB),
        ("0::/a", VERSION_2.format(root="/", point="/my\\040groups"), {"/my groups/a/memory.max": GIB}, GIB),
        # Version 1, with a line for each controller, and beside version 2.
        (
            "5:cpu,cpuacct:/z\n4:memory:/a/b",
            VERSION_1.format(root="/", point=V1),
            {f"{V1}/a/memory.limit_in_bytes": GIB},
            GIB,
        ),
        (
            "9:name=systemd:/z\n4:memory:/docker/x\n0::/z",
            "\n".join([OTHER_1, VERSION_1.format(root="/docker/x", point=V1), VERSION_2.format(root="/", point="/u")]),
            {f"{V1}/memory.limit_in_bytes": GIB, "/u/z/cgroup.procs": 1, "/sys/fs/cgroup/cpu/z/cpu.shares": 2},
            GIB,
        ),
        ("4:memory:/a", VERSION_1.format(root="/", point=V1), {f"{V1}/a/memory.limit_in_bytes": NONE_1}, None),
        # Limits above what is mounted are in the kernel's own sum.
        (
            "4:memory:/pod/x",
            VERSION_1.format(root="/pod/x", point=V1),
            {
                f"{V1}/memory.limit_in_bytes": NONE_1,
                f"{V1}/memory.stat": f"cache 0\nhierarchical_memory_limit {GIB}\nhierarchical_memsw_limit {NONE_1}",
            },
            GIB,
        ),
        # A group apart from those above it is not limited by them.
        (
            "4:memory:/a/b",
            VERSION_1.format(root="/", point=V1),
            {
                f"{V1}/a/memory.limit_in_bytes": GIB,
                f"{V1}/a/b/memory.limit_in_bytes": 2 * GIB,
                f"{V1}/a/b/memory.use_hierarchy": 0,
            },
            2 * GIB,
        ),
        ("", "", {}, None),
    ],
)
def test_the_least_limit_of_all_groups_around_counts(tmp_path, own, mounts, files, limit_bytes):
    found = host_memory(tree(tmp_path, own, mounts, files))
    assert found.limit_bytes == (MACHINE_BYTES if limit_bytes is None else limit_bytes)
    assert (found.where == MACHINE) == (limit_bytes is None)


def test_a_kernel_without_groups_has_its_memory(tmp_path):
    assert host_memory(tmp_path) == HostMemory(MACHINE_BYTES)


def test_a_limit_of_a_group_above_is_named(tmp_path):
    place = tree(tmp_path, "0::/kube/pod/c", VERSION_2.format(root="/", point=V2), {f"{V2}/kube/pod/memory.max": GIB})
    assert host_memory(place).where == "this container (control group /kube/pod)"


# -- a real one ------------------------------------------------------------------------------------

SAY = "from kvdisk.worker.host_memory import host_memory; print(host_memory().limit_bytes)"
ENTER = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); exec(sys.argv[2])"


@pytest.fixture
def group_of_mine() -> Iterator[tuple[Path, str]]:
    """A group with one below it, where this user may make some, and the name of the limit's
    file."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    by_controller = {each: line.split(":", 2)[2] for line in own for each in line.split(":", 2)[1].split(",")}
    top, name = (
        (Path(V1) / by_controller["memory"].lstrip("/"), "memory.limit_in_bytes")
        if "memory" in by_controller
        else (Path(V2) / by_controller.get("", "").lstrip("/"), "memory.max")
    )
    parent = top / f"kvdisk-{os.getpid()}"
    child = parent / "below"
    try:
        parent.mkdir()
        if not (parent / name).exists():
            raise OSError("no limits here")
        child.mkdir()
    except OSError as error:
        if parent.exists():
            parent.rmdir()
        pytest.skip(f"no group can be made here: {error}")
    yield parent, name
    child.rmdir()
    parent.rmdir()


def test_a_real_limit_of_a_parent(group_of_mine):
    parent, name = group_of_mine
    (parent / name).write_text(str(2 * GIB))
    entry = parent / "below" / "cgroup.procs"
    done = subprocess.run([sys.executable, "-c", ENTER, entry, SAY], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(2 * GIB), done.stderr


# -- all ranks of a host ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deployment", "fits", "said"),
    [
        (Deployment(), True, ""),
        (Deployment(ranks=2), True, ""),
        (Deployment(ranks=3), False, "3 ranks need 30.00 GiB of host memory, and this machine has 23.50 GiB; lower"),
        (Deployment(ranks=4, hosts=2), True, ""),
        (Deployment(ranks=5, hosts=2), False, "3 ranks need"),
        (Deployment(ranks=1, engines=3), False, "3 ranks of 3 engines need 30.00 GiB"),
    ],
)
def test_all_ranks_of_this_host_count_together(deployment, fits, said):
    memory = HostMemory(int(23.5 * GIB))
    if fits:
        check_host_memory(10 * GIB, deployment, memory)
        return
    with pytest.raises(ConfigError) as refusal:
        check_host_memory(10 * GIB, deployment, memory)
    assert said in str(refusal.value) and "lower cpu_bytes" in str(refusal.value)


def test_cpu_bytes_beside_the_machine_with_any_number_of_ranks():
    """Of two ranks each has half, which fits."""
    config = Config(cpu_bytes=int(MACHINE_BYTES * 1.5))
    for deployment in (Deployment(), Deployment(ranks=2), Deployment(ranks=8)):
        with pytest.raises(ConfigError, match=r"of host memory, and .* lower cpu_bytes"):
            check_sizes(config, deployment)
    check_sizes(config, Deployment(ranks=8, hosts=4))
    half = Config(cpu_bytes=MACHINE_BYTES * 6 // 10)
    with pytest.raises(ConfigError, match="2 ranks of 2 engines"):
        check_sizes(half, Deployment(engines=2))


def test_what_is_free_is_the_least_of_the_machine_and_all_groups(tmp_path):
    own = "4:cpu,memory:/b/c\n1:name=systemd:/\n0::/a/own"
    mounts = f"{VERSION_2.format(root='/', point=V2)}\n{VERSION_1.format(root='/', point=V1)}"
    place = tree(tmp_path, own, mounts, {"/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB"})
    assert free_memory_bytes(place) == 4000 << 10, "they say nothing"
    second = {"memory.max": 3_000_000, "memory.current": 1_000_000, "memory.stat": "anon 5\ninactive_file 500000"}
    tree(tmp_path, own, mounts, {f"{V2}/a/own/memory.max": "max", f"{V2}/a/own/memory.current": 100})
    tree(tmp_path, own, mounts, {f"{V2}/a/{name}": text for name, text in second.items()})
    assert free_memory_bytes(place) == 2_500_000, "its parent has a limit"
    first = {"limit_in_bytes": 1_000_000, "usage_in_bytes": 1_000_000, "stat": "total_inactive_file 20000"}
    tree(tmp_path, own, mounts, {f"{V1}/b/memory.{name}": text for name, text in first.items()})
    assert free_memory_bytes(place) == 20_000, "of version 1"


def test_of_this_machine_it_is_a_number():
    assert free_memory_bytes() > 0
