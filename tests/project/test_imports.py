"""The direction of imports, and the modules that must never import torch."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch
from support import stored
from support.golden_files import CASES
from support.modules import MODULES

import quanterr

# The rooms: packages and single modules of the first level. A room imports from its own floor's predecessors only.
FLOORS = [
    {"version", "errors", "lazy_torch"},
    {"metrics"},
    {"util"},
    {"selection", "declarations"},
    {"options", "checkpoints", "documents"},
    {"advice"},
    {"ranking", "differences", "outputs"},
    {"views"},
    {"gates", "tensors"},
    {"kernel"},
    {"formats"},
    {"pairing", "recipes"},
    {"samples"},
    {"findings"},
    {"inspection", "origin"},
    {"comparison", "evaluation", "guide"},
    {"planning", "dequantization"},
    {"cli", "lm_eval", "quanterr"},
    {"__main__"},
]
COMPUTING = {
    "recipes",
    "evaluation",
    "lm_eval",
    "dequantization",
    "planning",
    "comparison",
    "origin",
}  # rooms that may need torch at once


def room(module):
    return module.split(".")[1] if "." in module else module


@cache
def list_imports(module, at_once=False):
    """Return a module's imports from the package, and torch; ``at_once``: only those at import time."""
    tree = ast.parse(MODULES[module].read_text())
    if at_once:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
        tree.body = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {name if (name := f"{node.module}.{a.name}") in MODULES else node.module for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("quanterr", "torch")}


def test_every_room_has_its_floor():
    assert set.union(*FLOORS) == {room(module) for module in MODULES}


def test_imports_point_downwards():
    upwards = []
    for module in sorted(MODULES):
        floor = next(n for n, rooms in enumerate(FLOORS) if room(module) in rooms)
        allowed = {room(module)}.union(*FLOORS[:floor])
        own_imports = {name for name in list_imports(module) if name.startswith("quanterr")}
        upwards += [(module, name) for name in own_imports if room(name) not in allowed]

    assert [] == upwards


def test_documents_name_modules_of_views_and_outputs_in_one_place():
    """Result's docstring explains the only cycle; no other cycle may hide in a name that is imported on use."""
    naming = [
        (module, node.value)
        for module in MODULES
        if room(module) == "documents"
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Constant) and str(node.value).startswith(("quanterr.outputs", "quanterr.views"))
    ]

    assert [("quanterr.documents.document", "quanterr.views")] == naming


def test_evaluation_is_imported_by_commands_alone():
    """Packages that compare, judge and show import nothing from evaluation/ but its documents."""
    users = {module for module in MODULES for name in list_imports(module) if room(name) == "evaluation"}

    assert {"cli", "dequantization", "evaluation", "lm_eval", "planning"} == {room(module) for module in users}
    assert {"quanterr.planning.verification"} == {module for module in users if room(module) == "planning"}


def test_evaluation_uses_no_private_names_of_others():
    private = [
        (module, alias.name)
        for module in MODULES
        if room(module) == "evaluation"
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]

    assert [] == private


def test_imports_form_no_cycle():
    """Imports for types and within functions count, too."""
    left = {module: {name for name in list_imports(module) if name in MODULES} - {module} for module in MODULES}
    while leaves := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in leaves}

    assert {} == left


def test_torch_is_imported_only_by_modules_that_compute_with_it():
    """All other modules take it from lazy_torch, and use none of its names while they are imported."""
    modules = [module for module in sorted(MODULES) if room(module) not in COMPUTING | {"__main__"}]
    modules.remove("quanterr.kernel.triton_sums")  # Triton comes with torch for GPUs
    code = f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    assert (0, "") == (done.returncode, done.stderr)


def test_formats_do_not_import_each_other():
    formats = {module for module in MODULES if module.startswith("quanterr.formats.") and module.count(".") == 2}
    formats -= {"quanterr.formats.base", "quanterr.formats.shared"}

    assert set() == {(module, other) for module in formats for other in list_imports(module) & formats}


def test_commands_that_need_no_torch_do_not_import_it():
    """Only running them shows their imports inside functions."""
    commands = [["--help"], ["compare", "--help"], ["schema"], ["render", "--help"], ["gate", "--help"]]
    commands += [["diff", "--help"], ["rank", "--help"]]
    code = (
        "import sys, quanterr.outputs\nfrom quanterr.cli import app\n"
        f"for words in {commands}:\n    app(words, standalone_mode=False)\n"
        "    assert not {'torch', 'jinja2'} & sys.modules.keys(), words\n"
        "[output.write for output in quanterr.outputs.OUTPUTS]\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    assert (0, "") == (done.returncode, done.stderr)


def test_inspecting_headers_of_any_format_does_not_import_torch():
    """Checks of shapes and of small tensors decide the format; only values need torch."""
    code = (
        "import sys\nfrom quanterr.inspection import inspect\n"
        f"for file in {[str(case) for case in CASES]}:\n    inspect(file)\n"
        "    assert 'torch' not in sys.modules, file"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (0, "") == (done.returncode, done.stderr)


def test_mistakes_end_commands_before_torch_is_imported(tmp_path):
    """Importing torch takes seconds. This runs in its own process, as forked ones have already imported torch."""
    good, damaged = str(tmp_path / "good.safetensors"), str(tmp_path / "damaged.safetensors")
    stored.write(Path(good), {"X.weight": torch.ones(4, 4)})
    Path(damaged).write_bytes(b"\xff" * 64)
    pair, missing = [good, good], str(tmp_path / "missing")
    mistakes = [
        (2, ["compare", good]),
        (2, ["compare", *pair, "--unknown"]),
        (2, ["compare", *pair, "--device", "gpu"]),
        (2, ["compare", *pair, "-l", "re:("]),
        (2, ["compare", *pair, "--require", "snr >"]),
        (2, ["compare", *pair, "-o", "report.docx"]),
        (3, ["compare", *pair, "--importance", missing]),
        (3, ["compare", *pair, "--baseline", missing]),
        (3, ["compare", *pair, "--plan", missing]),
        (3, ["compare", good, missing]),
        (3, ["compare", good, damaged]),
        (3, ["rank", *pair, damaged]),
        (3, ["sweep", damaged]),
        (2, ["plan", good]),
        (3, ["plan", missing, "--bits", "4"]),
        (3, ["inspect", damaged]),
        (2, ["inspect", good, "--hardware", "abacus"]),
        (2, ["evaluate", good]),
        (3, ["evaluate", good, missing]),
        (2, ["gate", missing, "--require", "snr >"]),
    ]
    code = (
        "import sys\nfrom quanterr import cli\n"
        f"for status, words in {mistakes}:\n    sys.argv[1:] = words\n"
        "    assert status == cli._run_app(), words\n    assert 'torch' not in sys.modules, words"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert 0 == done.returncode, done.stderr


HIDDEN = """
import sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
from quanterr import cli
for status, words in {calls}:
    sys.argv[1:] = words
    assert status == cli._run_app(), words
"""


def test_stored_results_are_judged_and_shown_without_torch(tmp_path):
    """This runs in its own process, as the forked ones of other tests have imported torch."""
    good, report = str(tmp_path / "good.safetensors"), str(tmp_path / "r.json")
    stored.write(Path(good), {"X.weight": torch.ones(4, 4)})
    quanterr.compare(good, good, device="cpu").save(report)
    calls = [
        (4, ["gate", report, "--thresholds", "fp8", "-q"]),
        (0, ["diff", report, report, "-q"]),
        (0, ["render", report, "-o", str(tmp_path / "r.html"), "-o", str(tmp_path / "r.md"), "-q"]),
        (5, ["compare", good, good]),
    ]
    done = subprocess.run([sys.executable, "-c", HIDDEN.format(calls=calls)], capture_output=True, text=True)

    assert 0 == done.returncode, done.stderr
    assert "quanterr: this command needs torch, which is not installed: pip install torch" in done.stderr


def test_version_is_printed_without_the_report():
    code = "from quanterr.cli import app; app(['--version'], standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )

    assert "quanterr.documents" not in done.stderr


def test_every_public_name_can_be_imported():
    names: dict[str, object] = {}
    exec("from quanterr import *", names)

    assert set(quanterr.__all__) <= names.keys()
