"""Fixtures that catch leaks: the library must not touch what belongs to the host program."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.support import CLAIMS, Support, claims_of

settings.register_profile("hdet", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("many", deadline=None, max_examples=1000, derandomize=True)  # --hypothesis-profile=many
settings.load_profile("hdet")
# The models of tests are small, and two processes of tests share the cores. What they start inherits it.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """After each test: environment, root logger, threads, process groups and child processes as before."""
    environment, handlers, threads = _environment(), list(logging.getLogger().handlers), set(threading.enumerate())
    yield
    assert _environment() == environment
    assert list(logging.getLogger().handlers) == handlers
    assert not dist.is_initialized()
    assert not multiprocessing.active_children()
    assert not {thread for thread in threading.enumerate() if not thread.daemon} - threads


def _environment() -> dict[str, str]:
    """Without what pytest, torch's compiler and PEFT set by themselves."""
    theirs = (
        "PYTEST_",
        "TORCHINDUCTOR_",
        "_TORCHINDUCTOR_",
        "TRITON_",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "CUDA_MODULE_LOADING",
    )
    return {key: value for key, value in os.environ.items() if not key.startswith(theirs)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the golden histories anew")
    parser.addoption("--support", type=Path, help="write what the marks `covers` claim, and the outcomes, to this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--support")
    if path is not None:
        config.pluginmanager.register(Support(path))


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[CLAIMS] = [claim for item in items for claim in claims_of(item)]


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regenerate"))
