"""The native library, checked without Python: for this processor, and for Arm under user-mode emulation.

Needs cmake, a C++20 compiler, the cross compiler and the emulator (Debian: g++-aarch64-linux-gnu, qemu-user-static).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NATIVE = REPOSITORY / "src/writehead/kernels/cpu/native"
ARM = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++")


@pytest.mark.parametrize(
    ("compiler", "options", "emulator", "expected"),
    [
        ("g++", ("-DCMAKE_CXX_COMPILER=g++",), (), {"generic"}),
        ("aarch64-linux-gnu-g++", ARM, ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"), {"dotprod", "generic"}),
    ],
)
def test_every_set_agrees_with_formulas_in_double(
    tmp_path: Path, compiler: str, options: tuple[str, ...], emulator: tuple[str, ...], expected: set[str]
) -> None:
    run("cmake", "-S", str(NATIVE), "-B", str(tmp_path), "-DCMAKE_BUILD_TYPE=Release", *options)
    run("cmake", "--build", str(tmp_path), "--parallel", "2")
    check, library = tmp_path / "check", tmp_path / "libwritehead_cpu.so"
    source = str(REPOSITORY / "tests/native/check.cpp")
    run(compiler, "-std=c++20", "-O1", source, "-o", str(check), str(library), f"-Wl,-rpath,{tmp_path}", "-pthread")
    report = run(*emulator, str(check))
    print(report)
    checked = {line.split(":")[0] for line in report.splitlines() if "at most" in line}
    assert expected <= checked
    assert "FAILED" not in report


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
