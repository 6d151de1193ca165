"""Sphinx configuration of the site over `spec/`: chapters run while they are built, and no page asks the network."""

import hashlib
import importlib.util
import logging
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

project = "statescan"
language = "en"
html_title = "statescan"
extensions = ["myst_nb", "clause_box", "data_pages"]
include_patterns = ["index.md", "findings.md", "[0-9][0-9]_*.py"]
nitpicky = True

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_render_markdown_format = "gfm"

# A stored result is reused only while everything that a chapter can import is unchanged: the folder is named by that.
_folders = (ROOT / "spec", ROOT / "reference", ROOT / "conformance" / "mutants")
_sources = sorted(path for folder in _folders for path in folder.rglob("*.py"))
_digest = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()[:12]
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "jupyter_cache" / _digest)
nb_execution_raise_on_error = True
nb_execution_timeout = 120

# Kernels start from an IPython folder of their own: no start-up files of the user, and no words about their sockets.
_profile = HERE / "_build" / "ipython" / "profile_default"
_profile.mkdir(parents=True, exist_ok=True)
(_profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 'ERROR'\n", "utf-8")
os.environ["IPYTHONDIR"] = str(_profile.parent)
logging.getLogger("traitlets").setLevel(logging.WARNING)

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["statescan.css"]
html_js_files = ["stepper.js", "filter.js"]
templates_path = ["_templates"]
_parts = ("sidebar/brand", "sidebar/search", "sidebar/scroll-start", "sidebar/navigation", "data", "sidebar/scroll-end")
html_sidebars = {"**": [f"{part}.html" for part in _parts]}
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

# Of the offline MathJax only the one file that the pages load.
mathjax_path = "mathjax/tex-svg.js"


def setup(app):
    def copy_mathjax(app, error):
        if error is None and app.builder.format == "html":
            package = importlib.util.find_spec("sphinx-mathjax-offline")
            source = Path(package.submodule_search_locations[0], "static", "mathjax", "tex-svg.js")
            target = Path(app.outdir, "_static", "mathjax")
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    app.connect("build-finished", copy_mathjax)
