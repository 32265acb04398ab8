# SPDX-License-Identifier: Apache-2.0
"""Builds the fake GPU into the environment whose Python runs this: the libraries go where
torch's CUDA build looks for NVIDIA's, and a ``.pth`` file has each process load the kernels.

``python build.py HEADERS``: the folder that has ``cuda_runtime_api.h``, of the wheel
``nvidia-cuda-runtime``. It takes a compiler, and binutils, which come with it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME = "libcudart.so.13"
KERNELS = "fake_gpu_kernels.so"
DRIVER = "libcuda.so.1"
OTHERS = re.compile(r"(cudnn|nccl|cusparseLt|nvshmem|cuf|cuF|cupti|nvtx|nvml|cu[A-Z]|nvrtc|nvJit|cudss)")
"""Functions of NVIDIA's other libraries, by how their names begin."""
DRIVER_ANSWERS = {
    "cuDevicePrimaryCtxGetState": "(int d, unsigned *f, int *a) { return fake_gpu_context_state(d, f, a); }",
    "cuGetErrorString": '(int e, const char **t) { *t = "an error of the fake driver"; return 0; }',
    "cuInit": "(unsigned f) { return 0; }",
    "cuDriverGetVersion": "(int *v) { *v = 13000; return 0; }",
}
"""What the driver answers; all else it refuses with CUDA_ERROR_NOT_SUPPORTED."""
NOT_SUPPORTED = 801
ALSO_ASKED_FOR = {"cudaDeviceReset"}
"""Functions of the runtime that vLLM asks for by name, beside those that torch is linked to."""
TOOLS = ("g++", "gcc", "nm", "readelf")
AT_ONCE = 2
"""How many compilers run, beside that of the kernels, which takes longest."""
NO_EXECUTABLE_STACK = '.section .note.GNU-stack,"",@progbits'


def output_of(*command: str | Path) -> str:
    """Run a command; return what it prints. What it says when it fails is printed."""
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed: {done.stderr[-3000:]}")
    return done.stdout


def needed(library: Path) -> list[str]:
    """Return the libraries that one asks the loader for."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-dW", library))


def undefined(library: Path) -> dict[str, str]:
    """Return the symbols that a library wants of others, each with its version, or ""."""
    lines = output_of("nm", "-D", "--undefined-only", library).splitlines()
    pairs = (line.split()[-1].partition("@") for line in lines)
    return {name: version.strip("@") for name, _, version in pairs}


def version_files(library: Path) -> dict[str, str]:
    """Return, of each version of symbols that a library wants, the library that it wants it
    from."""
    found, file = {}, ""
    for line in output_of("readelf", "-VW", library).splitlines():
        if match := re.search(r"File: (\S+)", line):
            file = match[1]
        elif file and (match := re.search(r"Name: (\S+)", line)):
            found[match[1]] = file
    return found


def defined(library: Path) -> set[str]:
    """Return the symbols that a library has for others."""
    lines = output_of("nm", "-D", "--defined-only", library).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line}


class Rig:
    """What is built, of one environment. ``out``: where the libraries go."""

    def __init__(self, packages: Path, headers: Path) -> None:
        self.torch, self.headers = packages / "torch", headers
        self.out = packages / "nvidia" / "cu13" / "lib"
        self.scratch = packages / "nvidia" / "cu13" / "build"
        for folder in (self.out, self.scratch):
            folder.mkdir(parents=True, exist_ok=True)
        self._own = {library.name: library for library in (self.torch / "lib").glob("*.so*")}
        self._wanted: dict[str, str] = {}
        self._file_of: dict[str, str] = {}
        for library in self._own.values():
            self._wanted |= undefined(library)
            self._file_of |= version_files(library)

    def build(self) -> None:
        """Build everything. The kernels take longest: they compile beside the rest."""
        kernels = subprocess.Popen([str(each) for each in self._compile_kernels()])
        self._build_runtime()
        self._build_refusals()
        if kernels.wait() != 0:
            sys.exit("the kernels do not compile")
        self._link_kernels()

    def _build_runtime(self) -> None:
        """Build the runtime, with a refusal for each of its functions that torch wants and it
        lacks."""
        script = self.scratch / "runtime.map"
        script.write_text(RUNTIME + " { global: cuda*; __cuda*; fake_gpu_*; local: *; };\n")
        objects = self._compile_all(sorted((HERE / "runtime").glob("*.cpp")))
        lines = output_of("nm", "--defined-only", *objects).splitlines()
        there = {line.split()[-1] for line in lines if line}
        wanted = {name for name, version in self._wanted.items() if version == RUNTIME} | ALSO_ASKED_FOR
        self.absent = sorted(wanted - there)
        stubs = [".text"]
        for at, name in enumerate(self.absent):
            stubs += [f".globl {name}", f".type {name},@function", f"{name}: lea name_{at}(%rip),%rdi"]
            stubs += ["jmp fake_gpu_unimplemented@PLT"]
        stubs += [".section .rodata", *(f'name_{at}: .asciz "{name}"' for at, name in enumerate(self.absent))]
        source = self.scratch / "absent.S"
        source.write_text("\n".join([*stubs, NO_EXECUTABLE_STACK, ""]))
        versions = f"-Wl,--version-script={script}"
        target = ["-o", self.out / RUNTIME]
        output_of("g++", "-shared", f"-Wl,-soname,{RUNTIME}", versions, *target, *objects, source, "-lpthread")

    def _compile_all(self, sources: list[Path]) -> list[Path]:
        """Compile the runtime's sources, two at a time; return what they became."""
        names = re.findall(r"^\s*(cuda(?:Error\w+|Success))\s*=\s*\d+", self._header("driver_types.h"), re.MULTILINE)
        (self.scratch / "error_names.inc").write_text("".join(f'{{{name}, "{name}"}},\n' for name in names))
        how = ["-std=c++17", "-O2", "-g", "-fPIC", "-Wall", f"-I{self.headers}", f"-I{self.scratch}"]
        objects = [self.scratch / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, code: Path) -> None:
            output_of("g++", *how, "-c", "-o", code, source)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(compile_one, sources, objects))
        return objects

    def _header(self, name: str) -> str:
        return (self.headers / name).read_text()

    def _build_refusals(self) -> None:
        """Build a library of refusals for each of NVIDIA's that torch names."""
        known = {line.split()[0] for line in output_of("/sbin/ldconfig", "-p").splitlines()[1:]} | set(self._own)
        others = sorted({name for library in self._own.values() for name in needed(library)} - known - {RUNTIME})
        here = set().union(*(defined(library) for library in self._own.values()))
        loose = {
            name: ""
            for name, version in self._wanted.items()
            if not version and name not in here and OTHERS.match(name)
        }
        for at, soname in enumerate(others):
            if soname == DRIVER:
                self._build_driver()
                continue
            symbols = {name: version for name, version in self._wanted.items() if self._file_of.get(version) == soname}
            self._build_refusal(soname, symbols | (loose if at == 0 else {}))

    def _build_refusal(self, soname: str, symbols: dict[str, str]) -> None:
        """Build a library whose functions all return 1, which is a failure in each of NVIDIA's."""
        lines = [".text"]
        for name in symbols:
            lines += [f'.globl "{name}"', f'.type "{name}",@function', f'"{name}":', "mov $1,%eax", "ret"]
        source, script = self.scratch / f"{soname}.S", self.scratch / f"{soname}.map"
        source.write_text("\n".join([*lines, NO_EXECUTABLE_STACK, ""]))
        by_version: dict[str, list[str]] = {}
        for name, version in symbols.items():
            by_version.setdefault(version, []).append(f'"{name}";')
        versions = [f"{version} {{ global: {' '.join(names)} }};" for version, names in by_version.items() if version]
        script.write_text("\n".join([*versions, ""]))
        how = [f"-Wl,--version-script={script}"] if versions else []
        output_of("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", *how, "-o", self.out / soname, source)

    def _build_driver(self) -> None:
        """Build a driver that refuses all but what torch asks of it before anything else."""
        names = set(re.findall(r"CUDAAPI\s+(cu\w+)\(", self._header("cuda.h"))) | set(DRIVER_ANSWERS)
        refusal = f"(void) {{ return {NOT_SUPPORTED}; }}"
        functions = (f"int {name}{DRIVER_ANSWERS.get(name, refusal)}\n" for name in sorted(names))
        source = self.scratch / "driver.c"
        source.write_text("int fake_gpu_context_state(int, unsigned *, int *);\n" + "".join(functions))
        linked = [f"-L{self.out}", f"-l:{RUNTIME}"]
        output_of("gcc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", self.out / DRIVER, source, *linked)

    def _compile_kernels(self) -> list[str | Path]:
        include = self.torch / "include"
        folders = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]]
        code = self.scratch / "kernels.o"
        how = ["-std=c++20", "-O1", "-fPIC", *(f"-I{folder}" for folder in folders)]
        return ["g++", *how, "-c", "-o", code, HERE / "kernels.cpp"]

    def _link_kernels(self) -> None:
        lib = self.torch / "lib"
        libraries = ["-ltorch_cpu", "-lc10", "-lc10_cuda", f"-l:{RUNTIME}", "-Wl,--no-as-needed"]
        how = [f"-L{lib}", f"-L{self.out}", f"-Wl,-rpath,{lib}:{self.out}", "-Wl,--allow-shlib-undefined"]
        output_of("g++", "-shared", "-o", self.out / KERNELS, self.scratch / "kernels.o", *how, *libraries)


def have_processes_start_it(packages: Path, kernels: Path) -> None:
    """Have each process of this environment find ``site``, and start with what is in it; and the
    tests, so that those that are processes of their own find each other."""
    lines = [str(HERE / "site"), str(HERE.parent), f"import fake_gpu_start; fake_gpu_start.start({str(kernels)!r})"]
    (packages / "fake_gpu.pth").write_text("\n".join([*lines, ""]))


def main() -> None:
    """Build into this Python's environment; say what the runtime refuses."""
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        sys.exit(f"it takes {', '.join(missing)}: on Debian and Ubuntu install the package g++")
    packages = Path(sysconfig.get_paths()["purelib"])
    rig = Rig(packages, Path(sys.argv[1]).resolve())
    rig.build()
    have_processes_start_it(packages, rig.out / KERNELS)
    print(f"the runtime refuses: {' '.join(rig.absent)}")


if __name__ == "__main__":
    main()
