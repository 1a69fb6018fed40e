"""Bugs that can be planted: each replaces one function of the product in a process of its own.

A bug receives the function that it replaces as its first argument, then that function's arguments. With `called_by` it acts
only where that function calls it directly; anywhere else the product runs as it is.

A bug that no longer fits the product must not pass for a bug that was found: a name that is gone fails when the table is
imported, and an error that the bug's own lines raise ends the process with `BROKEN`.
"""

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

BROKEN = 70  # exit status: the bug itself is out of date

Function = Callable[..., Any]


@dataclass(frozen=True)
class Bug:
    """`what`: one sentence. `target`: the function, method or property that `replacement` takes the place of."""

    name: str
    what: str
    target: Any
    replacement: Function
    called_by: Function | None = None

    def plant(self) -> None:
        """Put the bug into this process. Nothing takes it out again."""
        original = _function_of(self.target)
        planted: Any = _planted(self, original)
        if isinstance(self.target, property):
            planted = property(planted)
        owner, attribute = _place_of(original)
        if owner is not None:
            setattr(owner, attribute, planted)
            return
        for module in list(sys.modules.values()):  # wherever it has been imported by name
            if vars(module).get(attribute) is original:
                setattr(module, attribute, planted)


class Bugs(dict[str, Bug]):
    """A table of bugs by name."""

    def bug(self, name: str, target: Any, what: str, *, called_by: Function | None = None) -> Callable[[Function], Bug]:
        """Enter the decorated function."""

        def enter(replacement: Function) -> Bug:
            _place_of(_function_of(target))
            assert name not in self, f"two bugs are called {name!r}"
            self[name] = Bug(name, what, target, replacement, called_by)
            return self[name]

        return enter

    def skip(self, name: str, target: Any, what: str, *, called_by: Function | None = None) -> None:
        """A bug that leaves out the call."""
        self.bug(name, target, what, called_by=called_by)(lambda original, *args, **kwargs: None)


def _function_of(target: Any) -> FunctionType:
    function = target.fget if isinstance(target, property) else target
    assert isinstance(function, FunctionType), f"{target!r} is no function of ours"
    return function


def _place_of(function: FunctionType) -> tuple[type | None, str]:
    """The class that holds `function` (None: a module does) and its name there."""
    *outer, name = function.__qualname__.split(".")
    owner: Any = sys.modules[function.__module__]
    for part in outer:
        owner = getattr(owner, part)
    return (owner if outer else None), name


def _planted(bug: Bug, original: FunctionType) -> Function:
    caller: CodeType | None = None if bug.called_by is None else bug.called_by.__code__  # type: ignore[attr-defined]
    assert not inspect.iscoroutinefunction(bug.replacement), f"{bug.name}: a coroutine's errors would not be seen here"

    @functools.wraps(original)
    def planted(*args: Any, **kwargs: Any) -> Any:
        if caller is not None and sys._getframe(1).f_code is not caller:
            return original(*args, **kwargs)
        try:
            return bug.replacement(original, *args, **kwargs)
        except (AttributeError, NameError, TypeError) as error:
            if _raised_in(error) == bug.replacement.__code__.co_filename:
                traceback.print_exception(error)
                sys.stderr.flush()
                os._exit(BROKEN)
            raise

    return planted


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename
