"""Which implementation serves a call: backends, the reasons why one cannot, and the user's choice among them.

A backend states in one predicate why it cannot serve a call. The same words go to the log (automatic choice), to the
error (explicit choice) and to `explain`. All of it traces under ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dskernels.checks import wrong_value

BACKENDS = ("cpu", "cuda", "triton", "reference")

ENVIRONMENT_VARIABLE = "DSKERNELS_BACKEND"

_logger = logging.getLogger("dskernels")
_operators: dict[str, Operator] = {}


@dataclass(frozen=True)
class Backend:
    """One implementation of one operator.

    Attributes:
        name: one of `BACKENDS`.
        refuses: the reason why it cannot serve a call, or None if it can.
        run: computes a call.
        unasked: the reason why automatic choice passes it by although it could serve the call, or None.
    """

    name: str
    refuses: Callable[[Any], str | None]
    run: Callable[[Any], Any]
    unasked: Callable[[Any], str | None] = lambda call: None


@dataclass(frozen=True)
class Operator:
    """An operator as the public function sees it.

    Attributes:
        name: the public function's name.
        prepare: validates the public arguments (all but ``backend``) and returns the call that backends take.
        backends: the implementations, in the order in which automatic choice tries them.
        example: draws the tensors and options of a small call that uses every feature, for the self-test.
        differentiable: whether backends other than the reference have a gradient.
    """

    name: str
    prepare: Callable[..., Any]
    backends: tuple[Backend, ...]
    example: Callable[[], tuple[list[torch.Tensor], dict[str, Any]]]
    differentiable: bool = True

    def choose(self, call: Any, backend: str | None) -> Backend:
        """The backend that serves ``call``.

        Raises:
            ValueError: ``backend`` names no backend.
            RuntimeError: the backend that was asked for cannot serve the call.
        """
        name, origin = _requested(backend)
        if name is not None:
            reason = self._refusal(name, call, asked=True)
            if reason is not None:
                raise RuntimeError(
                    f"{self.name}: backend '{name}' (chosen by {origin}) cannot serve this call: {reason}"
                )
            return self.find(name)
        for candidate in self.backends:
            reason = candidate.refuses(call) or candidate.unasked(call)
            if reason is None:
                return candidate
            # Dynamo cannot trace a logger, and a traced call is chosen for once, not once a call.
            if not torch.compiler.is_compiling() and _logger.isEnabledFor(logging.DEBUG):
                _logger.debug("%s: not '%s': %s", self.name, candidate.name, reason)
        raise RuntimeError(f"{self.name}: no backend serves this call; ask dskernels.explain for the reasons")

    def explain(self, call: Any, backend: str | None) -> Explanation:
        """What `choose` does with the same arguments, with the reasons of every backend."""
        name, origin = _requested(backend)
        refusals = {b: self._refusal(b, call, asked=name is not None) for b in BACKENDS}
        wanted = [b.name for b in self.backends] if name is None else [name]
        chosen = next((b for b in wanted if refusals[b] is None), None)
        return Explanation(self.name, chosen, origin, refusals)

    def find(self, name: str) -> Backend:
        """The implementation for backend ``name``; `choose` is what checks that there is one."""
        return next(candidate for candidate in self.backends if candidate.name == name)

    def _refusal(self, name: str, call: Any, *, asked: bool) -> str | None:
        for candidate in self.backends:
            if candidate.name == name:
                return candidate.refuses(call) or (None if asked else candidate.unasked(call))
        return f"{self.name} has no '{name}' implementation"


@dataclass(frozen=True)
class Explanation:
    """Why a call is served as it is; printing it gives a line for each backend.

    Attributes:
        operator: the operator's name.
        chosen: the backend that serves the call; None if the call raises.
        origin: what the choice rests on: ``"backend="``, ``"use_backend"``, ``"DSKERNELS_BACKEND"`` or ``"automatic"``.
        refusals: for each backend the reason why it cannot serve the call, or None if it can; where the choice is
            automatic, also the reason why it is passed by.
    """

    operator: str
    chosen: str | None
    origin: str
    refusals: dict[str, str | None]

    def __str__(self) -> str:
        lines = [f"{self.operator}: {self.chosen or 'raises'} ({self.origin})"]
        lines += [f"  {name:<9} {reason or 'can serve this call'}" for name, reason in self.refusals.items()]
        return "\n".join(lines)


def register(operator: Operator) -> Operator:
    """Makes ``operator`` known to `explain` and to ``python -m dskernels``."""
    _operators[operator.name] = operator
    return operator


def registered() -> tuple[Operator, ...]:
    """All operators, in the order of their registration."""
    return tuple(_operators.values())


def explain(
    operator: str | Callable[..., Any], /, *args: Any, backend: str | None = None, **kwargs: Any
) -> Explanation:
    """Says which backend would serve a call, and why the others would not; computes nothing.

    Args:
        operator: the public function or its name, such as ``dskernels.window_attention``.
        *args: the arguments of the call.
        backend: as in the call.
        **kwargs: the keyword arguments of the call.

    Returns:
        An object with ``chosen``, ``origin`` and ``refusals``; ``print`` shows it as text.

    Raises:
        ValueError: there is no such operator or backend.
        TypeError, ValueError, IndexError: the arguments are wrong, as the call itself would say.
    """
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", repr(operator))
    if name not in _operators:
        raise wrong_value("operator", f"one of {', '.join(_operators)}", name)
    return _operators[name].explain(_operators[name].prepare(*args, **kwargs), backend)


class use_backend:  # noqa: N801 - reads as a function, like torch.no_grad
    """Sets the backend of every later call on this thread; as a context manager, until the block ends.

    ``use_backend("reference")`` holds from then on; ``with use_backend("reference"):`` for the block alone.
    An argument ``backend=`` of a call goes before it, the environment variable ``DSKERNELS_BACKEND`` (read when
    dskernels is imported) comes after it, and automatic choice comes last.

    Args:
        backend: ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``; None goes back to the environment variable or
            to automatic choice.

    Raises:
        ValueError: there is no such backend.
    """

    def __init__(self, backend: str | None) -> None:
        _check_name("backend", backend)
        self._previous = _choice.backend
        _choice.backend = backend

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        _choice.backend = self._previous


class _Choice(threading.local):
    # Set in __init__, not as a class attribute: only then do Dynamo's guards see a later change.
    def __init__(self) -> None:
        self.backend: str | None = None


_choice = _Choice()
_environment_choice = os.environ.get(ENVIRONMENT_VARIABLE) or None


def _requested(argument: str | None) -> tuple[str | None, str]:
    if argument is not None:
        _check_name("backend", argument)
        return argument, "backend="
    if _choice.backend is not None:
        return _choice.backend, "use_backend"
    if _environment_choice is not None:
        _check_name(ENVIRONMENT_VARIABLE, _environment_choice)
        return _environment_choice, ENVIRONMENT_VARIABLE
    return None, "automatic"


def _check_name(argument: str, name: str | None) -> None:
    if name is not None and name not in BACKENDS:
        raise wrong_value(argument, f"one of {', '.join(BACKENDS)}", repr(name))
