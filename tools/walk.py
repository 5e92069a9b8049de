"""How far a reader walks through src/hdet: files, calls and changes of file of three things that hdet.auto does.

A change of file is a call from a function in one file of src/hdet to a function in another, also by way of torch, as
with hooks. The return from it is not counted again.

    python tools/walk.py            # the three walks
    python tools/walk.py --files    # and the calls in each file
    python tools/walk.py --lines    # lines of code of src/hdet by room, without docstrings, comments and blank lines
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src" / "hdet"
sys.path.insert(0, str(SOURCE.parent))
_INSIDE_A_LINE = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


class Walk(NamedTuple):
    """What one call took."""

    calls: Counter[str]
    """The calls in each file, whose path is relative to the source."""
    changes: int
    """The calls among them that come from another file."""

    def __str__(self) -> str:
        return f"{len(self.calls):3} files {self.calls.total():5} calls {self.changes:4} changes of file"


def walk_of(action: Callable[[], object], source: Path = SOURCE) -> Walk:
    """Do it, and count the calls of functions that are defined under ``source``."""
    calls: Counter[str] = Counter()
    stack: list[str] = []
    changes = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal changes
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event not in ("call", "return") or name in _INSIDE_A_LINE or not path.startswith(inside):
            return
        if event == "return":
            stack.pop()
            return
        calls[path.removeprefix(inside)] += 1
        changes += bool(stack) and stack[-1] != path
        stack.append(path)

    inside = f"{source}/"
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(before)
    return Walk(calls, changes)


def walks() -> dict[str, Walk]:
    """The construction of a search, a round's end in the middle of a run, and a step inside a round.

    Between the steps 400 and 599 of 1000 at least one round ends: it is the step with the most calls, and the step in
    the middle of the order is one on which nothing happens. The training is that of a small model with AdamW, on one
    rank and without a journal.
    """
    import torch

    import hdet

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made: list[Any] = []
    auto = hdet.auto  # imported outside the walk
    construction = walk_of(lambda: made.append(auto(optimizer, total_steps=1000)))
    steps = []
    for step in range(600):
        inputs = torch.randn(32, 8)
        loss = ((model(inputs) - inputs.sum(1, keepdim=True).sin()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()

        def make_step(loss: torch.Tensor = loss) -> None:
            optimizer.step()
            made[0].step(loss)

        walk = walk_of(make_step)
        if step >= 400:
            steps.append(walk)
    steps.sort(key=lambda walk: walk.calls.total())
    return {"hdet.auto(...)": construction, "a round's end": steps[-1], "a plain step": steps[len(steps) // 2]}


def lines_of(code: str) -> int:
    """The lines of a file that hold code: without docstrings, comments and blank lines.

    >>> lines_of('def f():\\n    "A docstring."\\n\\n    return 1  # a comment\\n')
    2
    """
    strings = [one.value for one in ast.walk(ast.parse(code)) if isinstance(one, ast.Expr)]
    docstrings = {one.lineno for one in strings if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return len(
        {
            line
            for token in tokens
            if token.type not in _NO_CODE and not (token.type == tokenize.STRING and token.start[0] in docstrings)
            for line in range(token.start[0], token.end[0] + 1)
        }
    )


def rooms(source: Path = SOURCE) -> Counter[str]:
    """Lines of code of each folder, or file, that lies in the source."""
    found: Counter[str] = Counter()
    for path in sorted(source.rglob("*.py")):
        found[path.relative_to(source).parts[0]] += lines_of(path.read_text(encoding="utf-8"))
    return found


def told(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines to print."""
    if arguments.lines:
        found = rooms()
        yield from (f"{lines:6} {room}" for room, lines in found.most_common())
        yield f"{found.total():6} in all"
        return
    for name, walk in walks().items():
        yield f"{name:15} {walk}"
        if arguments.files:
            yield from (f"    {calls:5} {path}" for path, calls in walk.calls.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="also the calls in each file")
    parser.add_argument("--lines", action="store_true", help="lines of code by room")
    for line in told(parser.parse_args()):
        print(line)


if __name__ == "__main__":
    main()
