"""A model that runs under autocast, whoever calls it."""

from __future__ import annotations

from typing import Any

from torch import nn

from dsaccel.amp import AutocastPolicy


def run_under_autocast(model: nn.Module, policy: AutocastPolicy) -> None:
    """Makes the forward of ``model`` run under ``policy.autocast()``; backward and the loss do not.

    By hooks, which a copy of the model keeps and which a pipeline's schedule, that calls forward itself, runs as well.
    """
    contexts: list[Any] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        context = policy.autocast()
        context.__enter__()
        contexts.append(context)

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        # Empty if another hook raised before `enter`.
        if contexts:
            contexts.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
