"""Second instances of kernel modules."""

from types import ModuleType

import pytest

from vecsim.kernels.compile.jit import DISABLED, entry, inner
from vecsim.kernels.rebinding import rebound

SOURCE = """
from vecsim.kernels.compile.jit import inner

@inner
def step(x):
    return x + 1

@inner
def twice(x):
    return step(step(x))

@inner
def other(x):
    return x * 10

def bind():
    @inner
    def thrice(x):
        return step(twice(x))

    return thrice
"""

USER = """
from vecsim.kernels.compile.jit import inner
import first
from first import other, twice

@inner
def use(x):
    return other(twice(x))
"""


@inner
def leap(x):
    return x + 100


@pytest.fixture
def first(monkeypatch):
    return module("first", SOURCE, monkeypatch)


def module(name: str, source: str, monkeypatch) -> ModuleType:
    made = ModuleType(name)
    monkeypatch.setitem(__import__("sys").modules, name, made)
    exec(source, made.__dict__)
    return made


def call(kernel, x):
    @entry
    def run(x):
        return kernel(x)

    return run(x)


def test_only_what_calls_a_changed_name_is_another(first):
    copy = rebound(first, step=leap)
    assert copy.step is leap
    assert copy.other is first.other
    assert copy.twice is not first.twice
    assert call(copy.twice, 0) == 200
    assert call(first.twice, 0) == 2


def test_kernels_bound_in_a_function(first):
    assert call(rebound(first, step=leap).bind(), 0) == 300
    assert call(first.bind(), 0) == 3


def test_a_module_over_a_copy(first, monkeypatch):
    user = module("user", USER, monkeypatch)
    copy = rebound(user, rebound(first, step=leap))
    assert call(copy.use, 0) == 2000
    assert call(user.use, 0) == 20
    assert copy.first is not first


@pytest.mark.skipif(DISABLED, reason="kernels are not compiled")
def test_what_is_not_called_is_not_compiled(first):
    copy = rebound(first, step=leap)
    assert call(copy.twice, 1) == 201
    assert not first.step.signatures
    assert not first.twice.signatures
