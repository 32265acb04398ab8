# SPDX-License-Identifier: Apache-2.0
"""What ``make`` does of itself where a package of the system is missing."""

from __future__ import annotations

import os
import sys

import install
import pytest

APT = """#!/bin/sh
echo "$@" >>{log}
[ "$1" = install ] && {act}
exit 0
"""


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """Makes an ``apt-get``, the only program there is; returns what it was told."""
    log = tmp_path / "told"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def make(act: str = "true"):
        program = tmp_path / "bin" / "apt-get"
        program.parent.mkdir()
        program.write_text(APT.format(log=log, act=act))
        program.chmod(0o755)
        return lambda: log.read_text().splitlines() if log.exists() else []

    return make


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Runs the whole for an environment in which pip may do nothing."""
    monkeypatch.setattr(sys, "argv", ["install.py", "--venv", str(tmp_path / ".venv")])

    def no_download(*_):
        raise AssertionError("pip was to download")

    monkeypatch.setattr(install.Installer, "_step", no_download)
    return install.main


def lose(monkeypatch, path):
    """Have a library missing until there is this file."""
    monkeypatch.setattr(install, "loads", lambda _library: path.exists())


def test_root_installs_what_vllm_links_to(tmp_path, monkeypatch, apt):
    library = tmp_path / "libnuma"
    lose(monkeypatch, library)
    told = apt(f": >{library}")
    install.install_libraries()
    assert told() == ["update -qq", "install -y -qq --no-install-recommends libnuma1"]
    install.install_libraries()
    assert len(told()) == 2, "what is there is not installed again"


@pytest.mark.parametrize("how", ["apt fails", "apt does nothing", "no apt", "not root"])
def test_else_one_sentence_names_the_package_before_anything_is_made(tmp_path, monkeypatch, apt, main, capsys, how):
    lose(monkeypatch, tmp_path / "libnuma")
    if how != "no apt":
        told = apt("exit 100" if how == "apt fails" else "true")
    if how == "not root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main() == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "needs libnuma.so.1" in sentence and "the package libnuma1" in sentence
    assert not (tmp_path / ".venv").exists()
    assert how != "not root" or told() == []


def test_the_documentation_needs_no_library_of_vllm(tmp_path, monkeypatch, main):
    lose(monkeypatch, tmp_path / "libnuma")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--docs"])
    monkeypatch.setattr(install.Installer, "make_venv", lambda _self: None)
    with pytest.raises(AssertionError, match="pip was to download"):
        main()


def test_a_library_that_is_listed_and_damaged_is_missing(tmp_path):
    (tmp_path / "lib.so").write_bytes(b"")
    assert not install.loads(str(tmp_path / "lib.so"))
    assert install.loads("libc.so.6")


def test_root_installs_what_makes_environments(tmp_path, monkeypatch, apt):
    """As on Debian, whose Python has ``ensurepip`` in a package of its own."""
    there = tmp_path / "ensurepip"
    told = apt(f": >{there}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo 3.11.9 && exit\n[ -e {there} ] || exit 1\nmkdir -p "$4"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/bin:/bin")
    install.Installer(tmp_path / ".venv", "", str(python)).make_venv()
    assert told() == ["update -qq", "install -y -qq --no-install-recommends python3.11-venv"]


NO_GPU, GPU = "exit 9", "echo 'GPU 0: NVIDIA H100'"
NO_VLLM, OF_CPU, OF_CUDA = "exit 1", "echo 0.32.0 2.13.0+cpu", "echo 0.32.0 2.11.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes programs, the only ones that there are; returns where they are. vLLM's own Python is
    not in the path."""
    monkeypatch.setattr(sys, "executable", "/nowhere")

    def make(smi: str, python3: str, of_vllm: str | None = None):
        acts = {"path/nvidia-smi": smi, "path/python3": python3, "own/python": of_vllm or NO_VLLM}
        for name, act in acts.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"#!/bin/sh\n{act}\n")
            (tmp_path / name).chmod(0o755)
        if of_vllm is not None:
            (tmp_path / "path" / "vllm").write_text(f"#!{tmp_path / 'own' / 'python'}\nimport vllm\n")
            (tmp_path / "path" / "vllm").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("smi", "python3", "of_vllm", "expected"),
    [
        (GPU, OF_CUDA, None, "path/python3"),
        (GPU, OF_CUDA, OF_CUDA, "own/python"),
        (GPU, OF_CUDA, OF_CPU, "path/python3"),
        (GPU, OF_CPU, None, None),
        (GPU, NO_VLLM, None, None),
        (NO_GPU, OF_CUDA, None, None),
    ],
)
def test_the_demo_runs_on_a_gpu_where_vllm_for_it_is_installed(machine, capsys, smi, python3, of_vllm, expected):
    place = machine(smi, python3, of_vllm)
    assert install.python_for("auto") == (expected and str(place / expected))
    assert install.python_for("cpu") is None
    said = capsys.readouterr().err
    assert ("no Python here has vLLM" in said) == (smi == GPU and expected is None)
    if expected is None:
        with pytest.raises(install.InstallError, match="DEVICE=cuda, but"):
            install.python_for("cuda")


def test_an_environment_beside_another_finds_its_packages_and_has_only_what_they_lack(tmp_path, monkeypatch):
    """Also where that is a virtual environment itself: this one."""
    monkeypatch.setattr(install, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "beside"\nversion = "1"\ndependencies = ["rich>=14", "torch"]\n'
        "[tool.setuptools]\npy-modules = []\n"
    )
    installer = install.Installer(tmp_path / ".venv-gpu", "", sys.executable)
    installer.make_venv()
    installer.install_beside()
    asked = "import importlib.metadata as found, kvdisk, rich; print(rich.__file__, found.version('beside'))"
    said = install.output_of(str(installer.python), "-c", asked)
    assert said.startswith(sys.prefix) and said.endswith(" 1"), "kvdisk is there by a link"
    own = {path.name for path in installer.venv.glob("lib/python*/site-packages/*.dist-info")}
    assert {name.partition("-")[0] for name in own} <= {"beside", "pip", "setuptools"}
    installer.worked = False
    installer.make_venv()
    installer.install_beside()
    assert not installer.worked, "nothing is done a second time"


def test_the_size_of_other_engines_is_said_before_they_are_installed(tmp_path, monkeypatch, capsys):
    (beside, own) = (tmp_path / ".venv", tmp_path / ".venv-engines")
    for venv in (beside, own):
        (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    installer = install.Installer(own, "")
    installer.stamps.mkdir()

    def install_one(self, name, what, *, apart):
        print(f"{name} is downloaded")
        (self.stamps / name).touch()

    monkeypatch.setattr(install.Installer, "_install_alone", install_one)
    installer.install_engines(beside)
    said = capsys.readouterr().out.splitlines()
    assert "0.6 GB" in said[0] and len(said) == 1 + len(install.ENGINE_PARTS)
    installer.install_engines(beside)
    assert "0.6 GB" not in capsys.readouterr().out, "they are there"
