"""What makes the site of the pages: docstrings as Markdown, equations as MathML, places that are filled.

Needs the extra docs; ``make docs`` installs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("latex2mathml")

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))
try:
    import docstrings
    import hooks
finally:
    sys.path.remove(str(DOCS))


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("Uses :class:`hdet.ProbeLoss` and ``x``.", "Uses `hdet.ProbeLoss` and ``x``."),
        (r"At :math:`\rho_r` times.", r"At $\rho_r$ times."),
        ("Text:\n\n.. math:: a = b,\n    c = d\n\nMore.", "Text:\n\n\n$$\na = b, c = d\n$$\n\nMore."),
        (
            ".. code-block:: python\n\n    for x in y:\n        pass\n\nArgs:\n    x: y.",
            "```python\nfor x in y:\n    pass\n```\n\nArgs:\n    x: y.",
        ),
        ("It adds.\n\n>>> 1 + 1\n2", "It adds.\n\n```pycon\n>>> 1 + 1\n2\n```"),
        ("Args:\n    a, b,\n        c: as in torch.", "Args:\n    a, b, c: as in torch."),
    ],
    ids=["roles", "inline math", "math", "code", "doctest", "names on two lines"],
)
def test_docstrings_become_markdown(written: str, wanted: str) -> None:
    assert docstrings.as_markdown(written) == wanted


def test_equations_become_mathml() -> None:
    page = r'<p>At <span class="arithmatex">\(\alpha &lt; 1\)</span>:</p><div class="arithmatex">\[x^2\]</div>'
    drawn = hooks.on_page_content(page)
    assert "arithmatex" not in drawn
    assert drawn.count("<math ") == 2
    assert 'display="inline"' in drawn
    assert 'display="block"' in drawn


def test_places_are_filled() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    filled = hooks.on_page_markdown("A\n<!-- fill: readme results -->\n<!-- fill: command export -->\nB", page=page)
    assert "fill:" not in filled
    assert "| `--every-step` |" in filled
    with pytest.raises(ValueError, match="nothing"):
        hooks.readme("nothing")


def test_decisions_are_listed_by_their_files() -> None:
    nav = [
        {"Home": "index.md"},
        {"Decisions": "decisions/"},
        {"Appendix": [{"More": "more.md"}, {"Why": "decisions/"}]},
    ]
    config = SimpleNamespace(nav=nav, docs_dir=str(DOCS))
    hooks.on_config(config)
    assert config.nav[0] == {"Home": "index.md"}
    assert config.nav[1]["Decisions"][0] == "decisions/001-layers.md"
    assert config.nav[2]["Appendix"][0] == {"More": "more.md"}
    assert config.nav[2]["Appendix"][1]["Why"] == config.nav[1]["Decisions"]
