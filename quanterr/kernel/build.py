"""Compilation of the kernel while quanterr is installed; without a C compiler nothing is compiled and nothing fails.

Hatch runs this file by its path, before the package can be imported. CC names the compiler. .github/make_wheels.py
cross-compiles and sets QUANTERR_PLATFORM: the platform of the wheel's tag, for which a kernel must then be built, or
``any`` for no kernel.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent
SOURCES = tuple(f"c/{name}.c" for name in ("compare", "doubts", "regions", "rounding", "samples", "searches"))
HEADERS = HERE / "c" / "kernel.h", HERE / "c" / "enums.h"
RECORD = HERE / "kernel.txt"  # in the folder of the libraries; library.read_record() reads it
# Neither -ffast-math nor contraction, so that results are the same on every instruction set.
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
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mfma", "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"),
}
# Architecture → the oldest macOS on which a supported Python runs.
MACOS = {"arm64": "11.0", "x86_64": "10.13"}


class BuildResult(NamedTuple):
    """The compiled libraries, and a record of the commands or of the compiler's error messages."""

    libraries: list[Path]
    record: str


def platform_tag() -> str:
    """Return the wheel's platform tag, which names the platform that its kernel is for."""
    if requested := os.environ.get("QUANTERR_PLATFORM"):
        return requested
    if platform.system() == "Darwin":  # Python may be universal, but the kernel is for one architecture
        machine = platform.machine()
        return f"macosx_{MACOS[machine].replace('.', '_')}_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_kernels(folder: Path, flags: tuple[str, ...] = ()) -> BuildResult:
    """Compile the sources for each instruction set of the machine that the wheel is for."""
    tag = platform_tag()
    if tag == "any":
        return BuildResult(
            [], "no kernel: this wheel is for any platform; build one from the source, with a C compiler"
        )
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        missing = shlex.join(compiler) or "CC, which is empty"
        return BuildResult([], f"no kernel: there is no C compiler {missing} (CC names another)")
    if platform.system() == "Darwin" and "QUANTERR_PLATFORM" not in os.environ:
        machine = platform.machine()
        compiler += ["-arch", machine, f"-mmacosx-version-min={MACOS[machine]}"]
    declared = hashlib.sha256(b"".join(header.read_bytes() for header in HEADERS)).hexdigest()[:16]
    header = f"-DHEADER=0x{declared}ull"  # structs.py compares it
    running, made, lines = [], [], []
    for name, instructions in INSTRUCTION_SETS.items():
        if instructions and not tag.endswith(("x86_64", "amd64")):
            continue
        library = f"kernel_{name}{'.dll' if tag.startswith('win') else '.so'}"
        command = [*compiler, *FLAGS, *flags, *instructions, header, *SOURCES, "-o"]
        place = os.path.relpath(folder / library, HERE)  # macOS writes the name into the library
        started = subprocess.Popen([*command, place], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # noqa: S603
        running.append((library, command, started))
    for library, command, started in running:  # all compile at the same time
        output, _ = started.communicate()
        lines.append(f"{library}: {shlex.join([*command, library])}")
        if started.returncode == 0:
            made.append(folder / library)
        else:
            lines += [f"failed with status {started.returncode}:", output.decode(errors="replace").strip()]
    return BuildResult(made, "\n".join(lines if made else ["no kernel: it cannot be compiled", *lines]))


def make_bill_of_materials(version: str, kernels: bool) -> str:
    """Return a CycloneDX document (PEP 770): quanterr and the compiler's runtime; nothing else is bundled."""
    purl = f"pkg:pypi/quanterr@{version}"
    licences = [{"license": {"id": "Apache-2.0"}}]
    component = {"type": "application", "bom-ref": purl, "name": "quanterr", "version": version, "purl": purl}
    runtime = {
        "type": "library",
        "bom-ref": "compiler-runtime",
        "name": "compiler-runtime",
        "description": "start-up code and detection of instructions that the C compiler links into the kernel",
    }
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component | {"licenses": licences}},
        "components": [runtime] if kernels else [],
    }
    return json.dumps(document, indent=2) + "\n"


class CustomBuildHook(BuildHookInterface[Any]):
    """A build hook that puts compiled kernels into a wheel for one platform, or makes a pure wheel without kernels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel into the source tree, where an editable installation looks for it too.

        Raises:
            RuntimeError: a wheel for a given platform was requested, but its kernel cannot be compiled.
        """
        for stale in (*HERE.glob("kernel_*.so"), *HERE.glob("kernel_*.dll")):
            stale.unlink()
        libraries, record = compile_kernels(HERE)
        if "failed with status" in record and "QUANTERR_PLATFORM" in os.environ:
            raise RuntimeError(record)
        RECORD.write_text(record + "\n", encoding="utf-8")
        self.app.display_info(record)
        build_data["artifacts"] += [
            "quanterr/kernel/kernel_*.so",
            "quanterr/kernel/kernel_*.dll",
            "quanterr/kernel/kernel.txt",
        ]
        self._folder = tempfile.TemporaryDirectory()
        sbom = Path(self._folder.name, "quanterr.cdx.json")
        sbom.write_text(make_bill_of_materials(self.metadata.version, bool(libraries)), encoding="utf-8")
        build_data["sbom_files"].append(str(sbom))
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the bill of materials, which is now in the wheel."""
        self._folder.cleanup()
