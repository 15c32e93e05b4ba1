"""Sphinx configuration. `make docs` builds the pages into docs/_build/html; every warning is an error."""

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "aiordma"
author = "aiordma contributors"
copyright = f"2026, {author}"
release = importlib.metadata.version("aiordma")
version = ".".join(release.split(".")[:2])

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "statuses",  # docs/_ext
    "stubs",
]
exclude_patterns = ["_build"]
html_static_path = ["_static"]

html_theme = "furo"
html_title = f"aiordma {release}"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
