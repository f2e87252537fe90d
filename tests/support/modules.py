"""The modules of the package, by name."""

from pathlib import Path

import quanterr

PACKAGE = Path(quanterr.__file__).parent

MODULES = {
    ".".join(("quanterr", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
