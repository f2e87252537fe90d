"""The compiled kernel under AddressSanitizer and UndefinedBehaviorSanitizer: golden files, then random weights.

python tests/sanitize.py [-n 1000000]
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from quanterr.kernel import build, library

HERE = Path(__file__).parent
FLAGS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
FOLDER = "QUANTERR_SANITIZED"  # the folder of the kernels for a child; not a setting of the command


def golden_files(folder: Path) -> int:
    """Test the kernel in a process that loads the sanitizers first; return its status."""
    compiler = os.environ.get("CC", "cc")
    first = [_find_library(compiler, name) for name in ("libasan.so", "libstdc++.so")]  # torch throws exceptions of C++
    environment = os.environ | {"LD_PRELOAD": " ".join(first), "ASAN_OPTIONS": "detect_leaks=0", FOLDER: str(folder)}
    return subprocess.run([sys.executable, __file__], env=environment).returncode


def _find_library(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def random_weights(folder: Path, n: int) -> int:
    """Run the kernel on so many random weights; return the status."""
    program = folder / "fuzz"
    best = library.find_best().kernel
    instructions = build.INSTRUCTION_SETS[best.instructions if best else "base"]
    flags = [flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    of_kernel = build.HERE / "c"
    sources = str(HERE / "fuzz" / "kernel_fuzz.c"), str(of_kernel / "samples.c")
    kernel_flags = f"-I{of_kernel}", "-DHEADER=0"
    command = ["cc", *flags, "-O2", *FLAGS, *instructions, *kernel_flags, *sources, "-o", str(program), "-lm"]
    subprocess.run(command, check=True)
    return subprocess.run([program, str(n)]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", type=int, default=1_000_000, help="random weights (half a millisecond each)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not build.compile_kernels(folder, FLAGS).libraries:
            sys.exit("no C compiler")
        return golden_files(folder) or random_weights(folder, options.n)


if __name__ == "__main__":
    if FOLDER in os.environ:
        sanitized = Path(os.environ.pop(FOLDER))
        library.library_path = lambda instructions, folder=sanitized: folder / f"kernel_{instructions}.so"
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", str(HERE / "kernel" / "test_native.py")]))
    sys.exit(main())
