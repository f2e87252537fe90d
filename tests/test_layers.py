"""The direction of the imports, and what must not be imported at all."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import quanterr

PACKAGE = Path(quanterr.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own layer and from those above it. The entry points are last.
LAYERS = [
    "errors",
    "text",
    "memory",
    "strict_json",
    "toml_file",
    "metrics",
    "roles",
    "report",
    "selection",
    "gates",
    "diffing",
    "ranking",
    "checkpoints",
    "labels",
    "gguf_names",
    "chunks",
    "tensors",
    "histogram",
    "formats",
    "sides",
    "views",
    "conventions",
    "composing",
    "sampling",
    "rotary",
    "translating",
    "pairing",
    "readings",
    "folding",
    "importance",
    "tasks",
    "kernel",
    "worker",
    "running",
    "measuring",
    "findings",
    "inspecting",
    "assembling",
    "progress",
    "commands",
    "gate_command",
    "diff_command",
    "comparison",
    "rank_command",
    "settings",
    "cli",
    "__main__",
]
TORCH_FREE = [
    "errors",
    "text",
    "memory",
    "strict_json",
    "toml_file",
    "metrics",
    "report",
    "roles",
    "selection",
    "gates",
    "ranking",
    "labels",
    "gguf_names",
    "progress",
    "settings",
]


def layer(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def layers_imported(path):
    """Layers that the module needs to be imported: what only types need does not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = [f"{node.module}.{alias.name}" for node in found for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("quanterr.")}


@pytest.mark.parametrize(
    "path", [p for p in MODULES if layer(p) != "__init__"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_point_backwards(path):
    allowed = set(LAYERS[: LAYERS.index(layer(path)) + 1]) | {"__version__"}

    assert set() == layers_imported(path) - allowed


def test_every_module_has_its_layer():
    assert set(LAYERS) == {layer(path) for path in MODULES} - {"__init__"}


@pytest.mark.parametrize(
    "code",
    [
        "import quanterr",
        "import quanterr.cli",
        "import quanterr.metrics, quanterr.report.model, quanterr.report.as_table, quanterr.report.as_json",
        "import quanterr.report.reading, quanterr.gates, quanterr.diffing",
        "import quanterr.ranking, quanterr.report.ranking_table",
        "import quanterr.report; [output.write for output in quanterr.report.OUTPUTS]",
        "import quanterr.selection, quanterr.errors",
        "from quanterr.cli import app; app(['--help'], standalone_mode=False)",
        "from quanterr.cli import app; app(['compare', '--help'], standalone_mode=False)",
        "from quanterr.cli import app; app(['schema'], standalone_mode=False)",
        "from quanterr.cli import app; app(['render', '--help'], standalone_mode=False)",
        "from quanterr.cli import app; app(['gate', '--help'], standalone_mode=False)",
        "from quanterr.cli import app; app(['diff', '--help'], standalone_mode=False)",
        "from quanterr.cli import app; app(['rank', '--help'], standalone_mode=False)",
    ],
)
def test_these_do_without_torch(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; sys.exit('torch' in sys.modules)"], stdout=subprocess.DEVNULL
    )

    assert 0 == done.returncode


def test_help_does_without_pydantic():
    code = "from quanterr.cli import app; app(['--version'], standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )

    assert "quanterr.report" not in done.stderr
