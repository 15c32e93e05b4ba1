"""Signatures of compiled modules, with the types that their stubs (aiordma/*.pyi) give."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.inspect import safe_getattr

PACKAGE = Path(__file__).parents[2] / "aiordma"


def _signature(function: ast.FunctionDef, is_method: bool) -> tuple[str, str]:
    arguments = function.args
    if is_method and not any(getattr(d, "id", "") == "staticmethod" for d in function.decorator_list):
        del (arguments.posonlyargs or arguments.args)[0]
    return f"({ast.unparse(arguments)})", ast.unparse(function.returns) if function.returns else ""


def _read(path: Path) -> dict[str, tuple[str, str]]:
    module = f"aiordma.{path.stem}"
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[f"{module}.{node.name}"] = _signature(node, False)
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    name = "" if item.name == "__init__" else f".{item.name}"
                    arguments, returns = _signature(item, True)
                    found[f"{module}.{node.name}{name}"] = arguments, returns if name else ""
    return found


_signatures: dict[str, tuple[str, str]] = {}


def process_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str] | None:
    if what == "property" or (signature == "()" and what == "class"):
        return None
    module = safe_getattr(obj, "__module__", None) or safe_getattr(inspect.unwrap(obj), "__module__", "")
    qualified = f"{module}.{safe_getattr(obj, '__qualname__', '')}"
    return _signatures.get(qualified)


def resolve(app: Sphinx, env: BuildEnvironment, node: Any, content: Any) -> Any:
    """Docstrings name classes as they are imported: ``:class:`Access``` is aiordma.Access wherever it's written."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or target.startswith("aiordma."):
        return None
    domain = env.get_domain("py")
    for prefix in ("aiordma", "aiordma._post", "aiordma._batch", "aiordma._offload"):
        found = domain.resolve_xref(
            env, node["refdoc"], app.builder, node["reftype"], f"{prefix}.{target}", node, content
        )
        if found is not None:
            return found
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    for path in sorted(PACKAGE.glob("*.pyi")):
        _signatures.update(_read(path))
    app.connect("autodoc-process-signature", process_signature)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
