"""Nothing in the tree turns bytes into code or objects of any class: no pickle, eval, exec, marshal, torch.load, ...

Read from the syntax tree, so that a comment is no finding and an alias is one. What is allowed is listed, with why.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.packages import PACKAGES, ROOT

SOURCES = (*PACKAGES, "benchmarks")

_MODULES = "pickle _pickle cPickle cloudpickle dill joblib marshal shelve jsonpickle yaml code codeop"
MODULES = frozenset(_MODULES.split())
CALLS = frozenset(("eval", "exec", "compile", "__import__"))
# What an object from a library may do; the name before the dot does not matter where it is unmistakable.
_METHODS = """recv_pyobj send_pyobj read_pickle to_pickle allow_pickle load_module torch.load numpy.load np.load os.system
    os.popen yaml.load weights_only"""
METHODS = frozenset(_METHODS.split())
KEYWORDS = frozenset(("allow_pickle", "trust_remote_code"))
SHELL = "shell"
# (file, finding) -> why it is no danger.
ALLOWED: dict[tuple[str, str], str] = {
    ("benchmarks/gpu_check.py", "importlib.import_module"): "one of our parts, from a table",
    ("benchmarks/report.py", "importlib.import_module"): "one of our measures, from a table",
    ("deploy/cli.py", "importlib.import_module"): "one of our subcommands, from a table",
    ("service/http/api.py", "importlib.import_module"): "middleware that the operator names on the command line",
    ("tandem/__init__.py", "importlib.import_module"): "one of our modules, from a table",
    ("service/process/fork_server.py", "importlib.import_module"): "one of our modules, named by its starter",
    (
        "transfer_backends/engines/mooncake.py",
        "importlib.import_module",
    ): "one of two modules of the library, both literal",
    ("transfer_backends/engines/nixl.py", "importlib.import_module"): "one of two names of the library, both literal",
}


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name.split(".")[0] for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = (node.module or "").split(".")[0]
            if module in MODULES:
                yield module
            yield from (f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in METHODS)
        elif isinstance(node, ast.Call):
            yield from _calls(node)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = dotted(node)
            if name in CALLS or name in METHODS or name.rpartition(".")[2] in METHODS or name.startswith("builtins."):
                yield name


def dotted(node: ast.expr) -> str:
    """Return the name that is written there; "?" stands for what is none before a dot."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _calls(node: ast.Call) -> Iterator[str]:
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS:
            yield keyword.arg
        if keyword.arg == SHELL and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
            yield "shell=True"
    named = node.args and isinstance(node.args[0], ast.Constant)
    if dotted(node.func) == "importlib.import_module" and not named:
        yield "importlib.import_module"


def scan() -> set[tuple[str, str]]:
    found = set()
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            found |= {(name, finding) for finding in findings(ast.parse(path.read_text(), name))}
    return found


def test_nothing_but_what_is_allowed() -> None:
    found = scan()
    assert sorted(found - ALLOWED.keys()) == [], "a way to run foreign code; if it is none, add it to ALLOWED with why"
    assert sorted(ALLOWED.keys() - found) == [], "no longer there: take it off the list"


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "import os, marshal as m", "from pickle import loads", "from torch import load"),
        *("x = eval", "exec(data)", "sock.recv_pyobj()", "torch.load(path)", "np.load(path, allow_pickle=True)"),
        *("subprocess.run(text, shell=True)", "importlib.import_module(name)"),
        *("AutoModel.from_pretrained(p, trust_remote_code=True)", "builtins.eval(x)"),
    ],
)
def test_the_scan_sees(code: str) -> None:
    assert list(findings(ast.parse(code)))


def test_the_scan_is_quiet_about_the_harmless() -> None:
    code = "# pickle\n'''eval'''\nre.compile(x)\nmodel.eval()\nsafetensors.load(x)\nself.exec_path\njson.load(f)"
    assert list(findings(ast.parse(code))) == []
