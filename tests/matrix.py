"""Run the tests under every setting that changes how numbers are computed, and with the oldest and newest libraries.

`make test-matrix` runs all of it (half an hour); `python tests/matrix.py --only avx2,lowest` some. Prints a table.
"""

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What is set in the environment of the tests.
SETTINGS = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
    "torch kernel": {"QUANTERR_KERNEL": "torch"},
    "native kernel": {"QUANTERR_KERNEL": "native"},
}
VERSIONS = {"lowest": "lowest-direct", "newest": "highest"}  # uv's --resolution


def install(name: str) -> Path:
    """Return the Python of a virtual environment with quanterr and the versions that uv resolves.

    Pip installs torch, as it knows local builds and other indexes.
    """
    folder = ROOT / f".venv-{name}"
    python = folder / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(dependency for dependency in project["dependencies"] if dependency.startswith("torch"))
    subprocess.run([*pip, "uv", torch.replace(">=", "==") if name == "lowest" else torch], check=True)
    requirements = subprocess.run(
        [folder / "bin/uv", "pip", "compile", "-q", "--no-header", "--no-annotate", "--extra", "dev",
         "--resolution", VERSIONS[name], "--python", python, ROOT / "pyproject.toml"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    others = [
        requirement
        for requirement in requirements.split()
        if not re.match(r"torch==|nvidia-|cuda-|triton==|quanterr", requirement)
    ]
    subprocess.run([*pip, *others], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
    return python


def run(python: Path, changed: dict[str, str], words: list[str]) -> tuple[bool, str, float]:
    """Return whether the tests pass, the last line of pytest, and the seconds that they took."""
    begun = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | changed, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0, lines[-1] if lines else "", time.monotonic() - begun


def main() -> int:
    """Run the settings that the command line names; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join([*SETTINGS, *VERSIONS]), help="settings, separated by commas")
    known, words = parser.parse_known_args()
    asked = known.only.split(",")
    if unknown := set(asked) - {*SETTINGS, *VERSIONS}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: choose from {', '.join([*SETTINGS, *VERSIONS])}")
    rows = []
    for name in asked:
        python = install(name) if name in VERSIONS else Path(sys.executable)
        rows.append((name, *run(python, SETTINGS.get(name, {}), words)))
    for name, passed, line, seconds in rows:
        print(f"{name:<14} {'pass' if passed else 'FAIL'}  {seconds:5.0f} s  {line}")
    return 0 if all(passed for _, passed, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
