"""Makes the source distribution and the wheels of all systems on a Linux machine, and checks them.

    python .github/make_wheels.py FOLDER

zig (PyPI: ziglang) compiles the kernel for each of TARGETS, through quanterr/kernel/build.py as every installation
does. The wheels are made of the source distribution, unpacked. The same commit gives the same bytes: what is in a
wheel has the time SOURCE_DATE_EPOCH, or else that of the commit.

Wheels for macOS and Windows are built and looked at, but not run.
"""

import base64
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
ELF, MACH_O, PE = b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ"
X86, ARM = ("base", "avx2", "avx512"), ("base",)


class Target(NamedTuple):
    """A kind of wheel."""

    platform: str  # of its tag
    zig: str  # what zig calls it
    begins: bytes  # the libraries of that system
    machine: bytes  # how they name the machine, somewhere in their first 512 bytes
    kernels: tuple[str, ...]


TARGETS = (
    Target("manylinux_2_17_x86_64", "x86_64-linux-gnu.2.17", ELF, b"\x03\x00\x3e\x00", X86),
    Target("manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", ELF, b"\x03\x00\xb7\x00", ARM),
    Target("musllinux_1_2_x86_64", "x86_64-linux-musl", ELF, b"\x03\x00\x3e\x00", X86),
    Target("musllinux_1_2_aarch64", "aarch64-linux-musl", ELF, b"\x03\x00\xb7\x00", ARM),
    Target("macosx_11_0_arm64", "aarch64-macos.11.0", MACH_O, b"\x0c\x00\x00\x01", ARM),
    Target("macosx_10_13_x86_64", "x86_64-macos.10.13", MACH_O, b"\x07\x00\x00\x01", X86),
    Target("win_amd64", "x86_64-windows-gnu", PE, b"PE\0\0\x64\x86", X86),
    Target("any", "", b"", b"", ()),
)


def main() -> None:
    """Make all, check all, list all."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("quanterr-*.whl"), *folder.glob("quanterr-*.tar.gz")):
        old.unlink()
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct", cwd=ROOT)
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    hatch(ROOT, folder, "sdist", environment)
    (source,) = folder.glob("quanterr-*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(source) as archive:
            archive.extractall(unpacked, filter="data")
        (tree,) = Path(unpacked).iterdir()
        for target in TARGETS:
            # Without -s the symbols of zig's own runtime would be ten times the size of the kernel.
            compiler = f"python -m ziglang cc -target {target.zig} -s"
            hatch(tree, folder, "wheel", environment | {"CC": compiler, "QUANTERR_PLATFORM": target.platform})
    wheels = {target: check(folder, target) for target in TARGETS}
    subprocess.run([BIN / "twine", "check", "--strict", source, *wheels.values()], check=True)
    for path in (source, *wheels.values()):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}  {path.stat().st_size:>9,}  {path.name}")


def hatch(tree: Path, folder: Path, target: str, environment: dict[str, str]) -> None:
    """Build one distribution of a source tree."""
    words = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(words, cwd=tree, env=environment, check=True)


def output(*words: str, cwd: Path | None = None) -> str:
    """What a program prints."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd).stdout.strip()


def check(folder: Path, target: Target) -> Path:
    """The wheel of a target; ends the program where anything about it is not as it has to be."""
    (path,) = folder.glob(f"quanterr-*-py3-none-{target.platform}.whl")
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    about = next(name.partition("/")[0] for name in content if ".dist-info/" in name)
    expect(content[f"{about}/WHEEL"].endswith(f"Tag: py3-none-{target.platform}\n".encode()), path, "WHEEL")
    rows = csv.reader(io.StringIO(content[f"{about}/RECORD"].decode()))
    recorded = {name: digest for name, digest, _ in rows if name != f"{about}/RECORD"}
    found = {name: digest_of(data) for name, data in content.items() if name != f"{about}/RECORD"}
    expect(recorded == found, path, "RECORD")
    sbom = json.loads(content[f"{about}/sboms/quanterr.cdx.json"])
    expect(f"quanterr-{sbom['metadata']['component']['version']}.dist-info" == about, path, "SBOM")
    suffix = "dll" if target.begins == PE else "so"
    kernels = {f"quanterr/kernel/kernel_{name}.{suffix}" for name in target.kernels}
    expect(kernels == {name for name in content if name.endswith((".so", ".dll", ".dylib"))}, path, "kernels")
    for name in kernels:
        begins = content[name][:512]
        expect(begins.startswith(target.begins) and target.machine in begins, path, name)
    expect("quanterr/kernel/kernel.txt" in content and "quanterr/py.typed" in content, path, "kernel.txt, py.typed")
    if target.begins == ELF:
        needed = {library for name in kernels for library in needed_by(content[name])}
        expect(needed <= {"libc.so.6", "libm.so.6", "libc.so"}, path, f"needs {needed}")
    if target.zig.endswith(".2.17"):  # auditwheel knows musl only where it is the system's own
        shown = output(str(BIN / "auditwheel"), "show", str(path))
        expect(runs_where_it_says(shown, target.platform), path, shown)
    return path


def runs_where_it_says(shown: str, platform: str) -> bool:
    """Whether auditwheel finds that a wheel needs no newer system than its tag says."""
    pattern = r"(\w+linux)_(\d+)_(\d+)_(\w+)"
    needed, tag = re.search(f'platform\\s+tag:\\s+"{pattern}"', shown), re.fullmatch(pattern, platform)
    if needed is None or tag is None:
        return False
    older = (int(needed[2]), int(needed[3])) <= (int(tag[2]), int(tag[3]))
    return older and (needed[1], needed[4]) == (tag[1], tag[4])


def needed_by(library: bytes) -> list[str]:
    """The libraries that an ELF library needs."""
    dynamic = ELFFile(io.BytesIO(library)).get_section_by_name(".dynamic")
    return [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]


def digest_of(data: bytes) -> str:
    """As RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def expect(holds: bool, path: Path, what: str) -> None:
    """End the program where something does not hold."""
    if not holds:
        sys.exit(f"{path.name}: wrong: {what}")


if __name__ == "__main__":
    main()
