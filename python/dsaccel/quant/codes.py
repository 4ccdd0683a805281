"""Modules whose buffers are codes and scales, which no cast may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dskernels.checks import shape_of, wrong_value


class HoldsCodes(nn.Module):
    """Persistent buffers keep their dtypes and values: ``.half()`` leaves them alone, ``.to(device)`` moves them, and
    ``load_state_dict`` refuses others."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Every .to(), .half() and .type() ends here. Codes and scales are moved from the tensors as they were: nothing
        # is rounded on the way.
        passing = self._non_persistent_buffers_set
        before = {name: buffer for name, buffer in self._buffers.items() if name not in passing}
        super()._apply(fn, recurse)
        keep_dtypes(self, before)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        wrong = _wrong_dtypes(self, state_dict, prefix)
        if wrong:
            # The last argument is the list of messages that load_state_dict raises.
            args[-1].extend(wrong)
            return
        super()._load_from_state_dict(state_dict, prefix, *args)


def keep_dtypes(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    """Gives the buffers of ``module`` the dtypes and values of ``before``, on the devices where they are now."""
    for name, old in before.items():
        new = module._buffers[name]
        if old is not None and new is not None and new.dtype != old.dtype:
            module._buffers[name] = old.to(new.device)


def _wrong_dtypes(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> list[str]:
    # Copying would reinterpret codes, and assigning would leave scales that no kernel takes.
    messages = []
    for name, buffer in module._buffers.items():
        value = state_dict.get(prefix + name)
        if buffer is not None and isinstance(value, Tensor) and value.dtype != buffer.dtype:
            messages.append(str(wrong_value(prefix + name, str(buffer.dtype), f"{value.dtype} {shape_of(value)}")))
    return messages
