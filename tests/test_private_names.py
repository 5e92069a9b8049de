"""Which private names of other packages the library touches, and why: a release of theirs may change any of them.

The names are counted in the source. Own names do not count: those that hdet's classes define, unless the class of torch
that one of them extends, or any object that users hand in, has the same.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer, lr_scheduler

import hdet

SOURCE = Path(hdet.__file__).parent
AT_MOST = 20


class Row(NamedTuple):
    """A name that stays."""

    where: str
    """A module, or a class, that has it or mentions it."""
    reason: str


_SCHEDULER = "torch.optim.lr_scheduler"
NAMES = {
    "_step_count": Row(_SCHEDULER, "part of a scheduler's state; Accelerate adds to it between steps, which is undone"),
    "_last_lr": Row(_SCHEDULER, "part of a scheduler's state; get_last_lr() reads it, and nothing public writes it"),
    "_schedule_phases": Row(_SCHEDULER, "part of OneCycleLR's state: where it rises and falls; finish() changes it"),
    "_anneal_func": Row(_SCHEDULER, "the value between two levels of OneCycleLR, cosine or linear"),
    "_update_lr": Row(_SCHEDULER, "SequentialLR calls it, and nothing else, when the turn of a scheduler begins"),
    "_foreach_copy_": Row("torch", "many copies in one launch, for which there is no public function"),
    "_foreach_norm": Row("torch", "many norms in one launch, at least in fp32; get_total_norm overflows in fp16"),
    "_version": Row("torch.Tensor", "shows that a rate on a device was written to, without reading it"),
    "_non_persistent_buffers_set": Row("torch.nn.Module", "buffers that are no part of a checkpoint are not averaged"),
    "_fsdp_flattened": Row(
        "torch.distributed.fsdp._common_utils", "the only mark of FSDP1's weights, which are refused"
    ),
    "_composable_state": Row("torch.distributed", "the module of the next one"),
    "_module_state_mapping": Row(
        "torch.distributed._composable_state", "FSDP2's modules, if no model= was given; an error if it is not found"
    ),
    "_get_backend": Row(
        "torch.distributed.ProcessGroup", "the way to the time-out of a user's group, which hdet's own take over"
    ),
    "_timeout": Row("torch.distributed.distributed_c10d", "the same; without it torch's default counts"),
    "_get_default_store": Row(
        "torch.distributed.distributed_c10d", "where ranks note that they are there; get_group_store() is of torch 2.9"
    ),
    "_group_world_size": Row("torchft.manager", "ranks of a replica; a manager without it is refused"),
    "_use_async_quorum": Row("torchft.manager", "it must be False; a manager without it is refused"),
    "_global_grad_norm": Row(
        "deepspeed.runtime.zero.stage3", "of all ranks, before a step; get_global_grad_norm() has it only afterwards"
    ),
    "_save_optimizer_and_scheduler": Row(
        "transformers.trainer", "where a checkpoint's folder is known, before it is whole"
    ),
    "_load_optimizer_and_scheduler": Row("transformers.trainer", "no event tells from which folder training resumes"),
}
if not hasattr(lr_scheduler.LRScheduler, "_update_lr"):  # as in torch 2.6
    del NAMES["_update_lr"]

STANDARD = {"_asdict", "_fields", "_make", "_replace", "_getframe", "_value_"}
"""Documented in Python's own library."""
HANDED_IN = (torch.Tensor, torch.nn.Module, Optimizer, lr_scheduler.LRScheduler, lr_scheduler.OneCycleLR)


def is_private(name: object) -> bool:
    """Whether it is a name with a leading underscore, and no special one such as ``__init__``."""
    return isinstance(name, str) and bool(re.fullmatch(r"_(?!_)\w*[a-zA-Z]\w*", name)) and "hdet" not in name


def names_of(kind: type) -> set[str]:
    """The private names of a class, those that its methods give to an object included."""
    try:
        given = set(re.findall(r"self\.(_\w+)", inspect.getsource(kind)))
    except (OSError, TypeError):  # written in C
        given = set()
    return {name for name in {*dir(kind), *given} if is_private(name)}


class Source:
    """The library's files, parsed, and its classes."""

    def __init__(self) -> None:
        files = sorted(SOURCE.rglob("*.py"))
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
        self.own = {name for tree in self.trees.values() for name in _defined(tree)}
        foreign = set().union(*map(names_of, HANDED_IN))
        if dist.is_available():
            foreign |= names_of(dist.ProcessGroup)
        self.foreign = foreign
        self.inherited = dict(_inherited())

    def uses(self) -> dict[str, list[str]]:
        """Every private name that is not hdet's own, and where it is touched."""
        found: dict[str, list[str]] = defaultdict(list)
        for path, tree in self.trees.items():
            for name, node in self._touched(path, tree):
                found[name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
        return {name: places for name, places in found.items() if name not in STANDARD}

    def _touched(self, path: Path, tree: ast.Module) -> Iterator[tuple[str, Any]]:
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts |= {id(one) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for one in node.values}
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        inside = {id(node): found.name for found in classes for node in ast.walk(found)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                kind = inside.get(id(node)) if _is_self(node.value) else None
                of_base = self.inherited.get((path.stem, kind or ""), set())
                if node.attr in of_base if kind else node.attr in self.foreign or node.attr not in self.own:
                    yield node.attr, node
            elif isinstance(node, ast.FunctionDef) and is_private(node.name):  # replaces one of a class of theirs
                if node.name in self.inherited.get((path.stem, inside.get(id(node), "")), set()):
                    yield node.name, node
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                parts = node.value.split(".") if re.fullmatch(r"[\w.]+", node.value) else []
                dotted = len(parts) > 1 and parts[0] != "hdet"
                yield from (
                    (part, node)
                    for part in parts
                    if is_private(part) and (dotted or part in self.foreign or part not in self.own)
                )
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hdet"):
                words = [*(node.module or "").split("."), *(one.name for one in node.names)]
                yield from ((word, node) for word in words if is_private(word))
            elif isinstance(node, ast.Import):
                words = [word for one in node.names for word in one.name.split(".")]
                yield from ((word, node) for word in words if is_private(word))


def _is_self(node: ast.expr) -> bool:
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def _defined(tree: ast.Module) -> Iterator[str]:
    """Attributes that classes define, by a method, by a field or in a method; and variables of types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):  # those describe others'
            for one in node.body:
                if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
                    yield one.name
                targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("TypeVar", "type"):
            yield from (one.value for one in node.args[:1] if isinstance(one, ast.Constant))


def _inherited() -> Iterator[tuple[tuple[str, str], set[str]]]:
    """For each class that extends one of another package, by file and name: the private names of that one."""
    for module in pkgutil.walk_packages(hdet.__path__, "hdet."):
        try:
            found = importlib.import_module(module.name)
        except ImportError:  # jax, which has no classes to extend
            continue
        for kind in (one for one in vars(found).values() if inspect.isclass(one) and one.__module__ == module.name):
            bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _NO_PACKAGES]
            yield (module.name.rpartition(".")[2], kind.__name__), set().union(*map(names_of, bases))


_NO_PACKAGES = {"hdet", "builtins", "abc", "typing", "enum", "collections", "contextlib", "logging", "io"}


@pytest.fixture(scope="module")
def uses() -> dict[str, list[str]]:
    return Source().uses()


def test_every_private_name_of_another_package_has_a_reason(uses: dict[str, list[str]]) -> None:
    unknown = {name: places for name, places in uses.items() if name not in NAMES}
    assert unknown == {}, "use what is public; if there is nothing, add a row with the reason, and a clear error"
    assert set(NAMES) - set(uses) == set(), "nothing touches these any more: remove their rows"
    assert len(uses) <= AT_MOST
    assert all(row.reason for row in NAMES.values())


@pytest.mark.parametrize("name", NAMES)
def test_it_is_still_called_so(name: str) -> None:
    """A rename upstream is to fail here, not in a user's run."""
    where = NAMES[name].where
    package = where.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "torch":
        importlib.import_module("torch.distributed.fsdp")
    parts, found = where.split("."), None
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        break
    text = inspect.getsource(found) if not hasattr(found, name) else ""
    assert hasattr(found, name) or re.search(rf"\b{name}\b", text), f"{where} has no {name} any more"


def test_the_count_sees_each_way_of_touching_a_name() -> None:
    source = Source()
    made = {
        "optimizer._cuda_graph_capture_health_check()": {"_cuda_graph_capture_health_check"},
        "m._buffers['x']": {"_buffers"},  # hdet has a function of that name
        "getattr(manager, '_replica_id', 1)": {"_replica_id"},
        "sys.modules.get('torch.utils._pytree')": {"_pytree"},
        "from torch.utils import _pytree": {"_pytree"},
        "from torch._dynamo import eval_frame": {"_dynamo"},
        "import torch._dynamo": {"_dynamo"},
        "state = {'_opt_called': True}": {"_opt_called"},
        "scheduler._run": set(),
        "state._replace(a=1)": {"_replace"},
        "f'{one}_of_{other}'": set(),
    }
    for text, names in made.items():
        assert {name for name, _ in source._touched(SOURCE / "made.py", ast.parse(text))} == names, text
    ours = "class OneCycleLR:\n    def f(self):\n        return self._step_count + self._counted + self._initial_step()"
    touched = source._touched(SOURCE / "onecycle.py", ast.parse(ours))
    assert {name for name, _ in touched} == {"_step_count", "_initial_step"}
