"""Compiles kernel.c while quanterr is installed; without a C compiler nothing is compiled and nothing fails.

Hatch runs this file by its path, before the package can be imported.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent
# Neither -ffast-math nor contraction: the digits are the same on every instruction set.
FLAGS = (
    "-std=c11",
    "-O3",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-Wno-psabi",
)
INSTRUCTION_SETS = {
    "base": (),
    "avx2": ("-mavx2",),
    "avx512": ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"),
}


def compile_kernels(folder: Path, flags: tuple[str, ...] = ()) -> list[Path]:
    """Compile kernel.c for each instruction set of this kind of machine; gives the libraries that were made."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        return []
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    made = []
    for name, instructions in INSTRUCTION_SETS.items():
        if instructions and not x86:
            continue
        library = folder / f"kernel_{name}.so"
        command = [*compiler, *FLAGS, *flags, *instructions, str(HERE / "kernel.c"), "-o", str(library)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:  # noqa: S603
            made.append(library)
    return made


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the compiled kernels into the wheel, which is then for one platform; or makes a pure wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the source tree, where an editable installation looks as well."""
        for stale in HERE.glob("kernel_*.so"):
            stale.unlink()
        if compile_kernels(HERE):
            platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag}"
            build_data["artifacts"].append("quanterr/native/kernel_*.so")
