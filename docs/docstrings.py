"""Docstrings of this project as Markdown: they are written in a little reStructuredText, the site reads Markdown."""

import re
from textwrap import dedent, indent
from typing import Any

import griffe

_BLOCK = r"(?P<space>[ \t]*)\.\. {}::[ \t]*(?P<rest>[^\n]*)\n(?P<body>(?:[ \t]*\n|(?P=space)[ \t]+\S[^\n]*\n?)*)"
_CODE = re.compile(rf"^{_BLOCK.format('code-block')}", re.MULTILINE)
_MATH = re.compile(rf"^{_BLOCK.format('math')}", re.MULTILINE)
_DOCTEST = re.compile(r"^(?P<space>[ \t]*)>>> .*\n(?:(?P=space)\S.*\n?)*", re.MULTILINE)
_INLINE_MATH = re.compile(r":math:`([^`]+)`")
_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]+)`")
_BROKEN_NAMES = re.compile(r"^([ \t]+(?:\w+, )*\w+,)\n[ \t]+((?:\w+, )*\w+:)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring in Markdown: code blocks, equations, doctests and roles; names of arguments on one line."""
    text = _CODE.sub(lambda match: _fenced(match, match["rest"], dedent(match["body"]).strip("\n")), f"{text}\n")
    text = _MATH.sub(_equation, text)
    text = _DOCTEST.sub(lambda match: _fenced(match, "pycon", dedent(match[0]).strip("\n")), text)
    text = _INLINE_MATH.sub(r"$\1$", text)
    text = _ROLE.sub(r"`\1`", text)
    return _BROKEN_NAMES.sub(r"\1 \2", text).rstrip("\n")


def _fenced(match: re.Match[str], language: str, body: str) -> str:
    return indent(f"```{language}\n{body}\n```\n\n", match["space"])


def _equation(match: re.Match[str]) -> str:
    """Between dollars, with empty lines around: it is a paragraph of its own."""
    body = " ".join([match["rest"], *(line.strip() for line in match["body"].splitlines())]).strip()
    return indent(f"\n$$\n{body}\n$$\n\n", match["space"])
