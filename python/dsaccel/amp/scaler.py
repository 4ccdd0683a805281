"""LossScaler: torch's GradScaler with bounds, clipping, an answer, and agreement between processes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsaccel.amp._fold import folds, preset_scale, step_folded
from dskernels import GradNorm, clip_and_scale_, grad_norm
from dskernels.checks import is_integer, is_number, wrong_type, wrong_value


@dataclass(frozen=True)
class StepResult:
    """What `LossScaler.step` did.

    ``bool(result)`` says whether the parameters were stepped; on a GPU, after a folded step, it waits for the answer.

    Attributes:
        stepped: a bool if the host had to know, else a scalar bool tensor on the device, which nobody has waited for.
        total_norm: float32 scalar: the unscaled norm of the optimizer's gradients before clipping. Where ``unscale_``
            came first and ``max_norm`` is not given, that at the time of ``unscale_``. None if nothing was read.
        returned: what ``optimizer.step`` returned.
    """

    stepped: bool | Tensor
    total_norm: Tensor | None = None
    returned: Any = None

    def __bool__(self) -> bool:
        return bool(self.stepped)


@dataclass
class _Record:
    """What an optimizer has gone through since the last update. ``measured`` is None if it has no gradients."""

    measured: GradNorm | None
    stepped: bool = False


class LossScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose scale has bounds, which clips, and which says whether it stepped.

    ::

        scaler = LossScaler("cuda")
        ...
        scaler.scale(loss).backward()
        result = scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        scaler.step_scheduler(scheduler)

    It takes the place of a GradScaler, with the same methods and checkpoints. `step` unscales and clips together:

    - **Folded**, with optimizers that unscale by themselves, which are torch's AdamW, Adam, SGD and Adagrad with
      ``fused=True`` (Adagrad not in torch 2.11): one read of the gradients finds the norm and whether all are finite;
      the optimizer then divides by ``scale * max(1, (norm + 1e-6) / max_norm)`` while it reads them itself. Nothing
      waits for the device, except in SGD's first step with momentum, and float16 gradients are welcome. As with
      GradScaler, the optimizer leaves the divided gradients in ``.grad``.
    - **Otherwise** one read, and one read and write, by `dskernels.clip_and_scale_`; the host then waits for whether to
      step, as GradScaler's does. float16 gradients are a ValueError, as there: dividing them loses the small ones.

    A step is skipped, and the scale multiplied by ``backoff_factor``, if any gradient of the optimizer is not finite.
    With accumulated gradients it is taken once for all microbatches, so one of them that is not finite costs the whole
    window, and one backoff. An optimizer without any gradient is not stepped, and has no say in the scale.

    Args:
        device: type of the device of the losses, as ``"cuda"`` or ``"cpu"``, or a `torch.device`. Default: ``"cuda"``.
        init_scale: the first scale. Default: 8192.
        growth_factor: by which the scale is multiplied after ``growth_interval`` steps in a row. Default: 2.
        backoff_factor: by which it is multiplied after a skipped step. Default: 0.5.
        growth_interval: steps in a row after which the scale grows. Default: 2000.
        enabled: if False the loss is not scaled and no step is skipped; `step` still clips. Default: True.
        min_scale: below which the scale never goes. Default: 4096.
        max_scale: above which it never goes. Default: 65536.
        process_group: processes that skip a step together if a gradient of any of them is not finite, and so have the
            same scale; all have to step. For parallelism in which gradients differ between processes (tensor, pipeline,
            expert); in `DistributedDataParallel` they do not, and those of ``fully_shard`` (DTensor) agree by
            themselves. The norm is not added up over it. Default: none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a value does not fit: ``0 < min_scale <= init_scale <= max_scale``, ``growth_factor > 1``,
            ``0 < backoff_factor < 1``, ``growth_interval >= 1``.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2 (loss scaling). The default scales are
    practitioners' advice. If steps go on being skipped at the smallest scale, the loss or the model is at fault.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 8192.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 4096.0,
        max_scale: float = 65536.0,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        for name, value in (
            ("init_scale", init_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
            ("min_scale", min_scale),
            ("max_scale", max_scale),
        ):
            if not is_number(value):
                raise wrong_type(name, "a number", value)
        if not 0 < min_scale <= max_scale < math.inf:
            raise wrong_value("min_scale and max_scale", "0 < min_scale <= max_scale < inf", (min_scale, max_scale))
        if not min_scale <= init_scale <= max_scale:
            raise wrong_value("init_scale", f"a number from {min_scale} to {max_scale}", init_scale)
        if not 1 < growth_factor < math.inf:
            raise wrong_value("growth_factor", "a finite number above 1", growth_factor)
        if not 0 < backoff_factor < 1:
            raise wrong_value("backoff_factor", "a number between 0 and 1", backoff_factor)
        if not is_integer(growth_interval):
            raise wrong_type("growth_interval", "an integer", growth_interval)
        if growth_interval < 1:
            raise wrong_value("growth_interval", "at least 1", growth_interval)
        kind = torch.device(device).type
        super().__init__(kind, float(init_scale), growth_factor, backoff_factor, growth_interval, enabled)
        self.min_scale, self.max_scale = float(min_scale), float(max_scale)
        self.process_group = process_group
        self._forget()

    def _forget(self) -> None:
        self._records: dict[int, _Record] = {}
        self._results: weakref.WeakKeyDictionary[Optimizer, StepResult] = weakref.WeakKeyDictionary()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale, for those who look at them or change them before `step`.

        Gradients of which any is not finite are left as they are. Does not wait for the device.

        Raises:
            RuntimeError: it was called since the last `update` already, or after `step`, or before `scale`.
            ValueError: a gradient is float16.
        """
        if not self.is_enabled():
            return
        record = self._records.get(id(optimizer))
        if record is not None:
            last = "step()" if record.stepped else "unscale_()"
            raise RuntimeError(f"unscale_: expected the first call since update(), got one after {last}")
        self._records[id(optimizer)] = _Record(self._measure(optimizer, self._current_scale("unscale_"), folded=False))

    def step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        *args: Any,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        **kwargs: Any,
    ) -> StepResult:
        """Unscales and clips the gradients of ``optimizer`` and steps it, unless one of them is not finite.

        Args:
            optimizer: any optimizer; several in turn are fine, each with its own gradients and its own clipping.
            args: handed to ``optimizer.step``, as are ``kwargs``. Closures are refused.
            max_norm: the largest norm, over all gradients of ``optimizer``, that is left as it is; not below 0.
                Default: no clipping.
            norm_type: ``p`` of the norm, positive, or inf. Default: 2.

        Returns:
            A `StepResult`.

        Raises:
            RuntimeError: it was called since the last `update` already, or before `scale`; or there is a closure.
            TypeError: ``max_norm`` or ``norm_type`` has the wrong type.
            ValueError: one of them does not fit, or a gradient is float16 and ``optimizer`` cannot fold.
        """
        if max_norm is not None:
            _check_max_norm(max_norm)
        elif not self.is_enabled():
            return self._remembered(optimizer, StepResult(True, None, optimizer.step(*args, **kwargs)))
        if kwargs.get("closure") is not None or any(callable(value) for value in args):
            raise RuntimeError("step: expected no closure, because its gradients would be neither unscaled nor clipped")
        earlier = self._records.get(id(optimizer))
        if earlier is not None and earlier.stepped:
            raise RuntimeError("step: expected the first call since update(), got another one")
        folded = folds(optimizer)
        divisor = self._divisor(optimizer, folded, is_unscaled=earlier is not None)
        if earlier is not None and max_norm is None:
            measured = earlier.measured
        else:
            measured = self._measure(optimizer, divisor, folded, max_norm, norm_type, earlier)
        if self.is_enabled():
            self._records[id(optimizer)] = _Record(measured, stepped=True)
        if measured is None:
            return self._remembered(optimizer, StepResult(False))
        if not folded:
            result = self._step_where_finite(optimizer, measured, args, kwargs)
        else:
            if max_norm is not None:
                divisor = _with_clipping(divisor, measured.total_norm, max_norm)
            found_inf = measured.found_inf if self.is_enabled() else None
            returned = step_folded(optimizer, divisor, found_inf, args, kwargs)
            stepped = True if found_inf is None else found_inf == 0
            result = StepResult(stepped, measured.total_norm, returned)
        return self._remembered(optimizer, result)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to what the steps since the last update found, within its bounds. Does not wait.

        Args:
            new_scale: sets the scale instead; of a tensor, which nobody looks at, the nearest within the bounds counts.

        Raises:
            RuntimeError: there was neither ``step`` nor ``unscale_`` since the last one.
            ValueError: ``new_scale`` is a number outside the bounds.
        """
        if not self.is_enabled():
            return
        scale = self._current_scale("update")
        if new_scale is not None:
            if is_number(new_scale) and not self.min_scale <= new_scale <= self.max_scale:
                raise wrong_value("new_scale", f"a number from {self.min_scale} to {self.max_scale}", new_scale)
            super().update(float(new_scale) if is_number(new_scale) else new_scale)
        else:
            if not self._records:
                raise RuntimeError("update: expected step() or unscale_() since the last update(), got neither")
            self._adapt(scale)
        scale.clamp_(self.min_scale, self.max_scale)
        self._records = {}

    def step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """``scheduler.step(*args, **kwargs)``, unless the last step of its optimizer was skipped.

        For schedulers that count steps of the optimizer. On a GPU it waits for the answer, after a folded step.

        Args:
            scheduler: a scheduler of `torch.optim.lr_scheduler`, or anything with ``optimizer`` and ``step``.

        Returns:
            Whether the scheduler advanced.

        Raises:
            RuntimeError: its optimizer was not stepped by this scaler yet.
        """
        result = self._results.get(scheduler.optimizer)
        if result is None:
            raise RuntimeError("step_scheduler: expected step(scheduler.optimizer) before, got none")
        if not result:
            return False
        scheduler.step(*args, **kwargs)
        return True

    def state_dict(self) -> dict[str, Any]:
        """As GradScaler's, with the bounds added; call it after `update`. GradScaler can load it, too."""
        state = super().state_dict()
        return {**state, "min_scale": self.min_scale, "max_scale": self.max_scale} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of a LossScaler, or of a GradScaler, whose scale is brought within the bounds.

        Raises:
            RuntimeError: the state is that of a disabled scaler.
        """
        if not self.is_enabled():
            return
        if state_dict:
            self.min_scale = float(state_dict.get("min_scale", self.min_scale))
            self.max_scale = float(state_dict.get("max_scale", self.max_scale))
            within = min(max(float(state_dict["scale"]), self.min_scale), self.max_scale)
            state_dict = {**state_dict, "scale": within}
        super().load_state_dict(state_dict)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        if self._records:
            raise RuntimeError("LossScaler: expected to be copied or pickled after update(), got a step before it")
        state = super().__getstate__()
        del state["_records"], state["_results"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _current_scale(self, caller: str) -> Tensor:
        if self._scale is None:
            raise RuntimeError(f"{caller}: expected scale(loss) before, got none")
        return self._scale

    def _divisor(self, optimizer: Optimizer, folded: bool, is_unscaled: bool) -> Tensor | None:
        """What the gradients have to be divided by yet, clipping aside."""
        scale = self._current_scale("step") if self.is_enabled() and not is_unscaled else None
        preset = preset_scale(optimizer) if folded else None
        return scale * preset if scale is not None and preset is not None else preset if scale is None else scale

    def _measure(
        self,
        optimizer: Optimizer,
        divisor: Tensor | None,
        folded: bool,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        earlier: _Record | None = None,
    ) -> GradNorm | None:
        """Reads the gradients and, unless folded, divides and clips them; None without gradients."""
        gradients = _gradients(optimizer)
        if not gradients and self.process_group is None:
            return None
        if folded:
            norm, found_inf = grad_norm(gradients, loss_scale=divisor, norm_type=norm_type)
        else:
            _refuse_float16(gradients)
            norm, found_inf = clip_and_scale_(gradients, max_norm=max_norm, loss_scale=divisor, norm_type=norm_type)
        if earlier is not None and earlier.measured is not None:
            found_inf = torch.maximum(found_inf, earlier.measured.found_inf.to(found_inf.device, non_blocking=True))
        if self.process_group is not None and self.is_enabled():
            # Where the scale is, because a process without gradients has no other device.
            found_inf = found_inf.to(self._current_scale("step").device, non_blocking=True)
            torch.distributed.all_reduce(found_inf, op=torch.distributed.ReduceOp.MAX, group=self.process_group)
        return GradNorm(norm, found_inf)

    def _step_where_finite(
        self, optimizer: Optimizer, measured: GradNorm, args: Iterable[Any], kwargs: dict[str, Any]
    ) -> StepResult:
        if self.is_enabled() and measured.found_inf.item():
            return StepResult(False, measured.total_norm)
        return StepResult(True, measured.total_norm, optimizer.step(*args, **kwargs))

    def _adapt(self, scale: Tensor) -> None:
        findings = [record.measured.found_inf for record in self._records.values() if record.measured is not None]
        if not findings:
            return
        found_inf = torch.stack([finding.to(scale.device, non_blocking=True) for finding in findings]).amax()
        growth_tracker: Any = self._growth_tracker
        torch._amp_update_scale_(
            scale,
            growth_tracker,
            found_inf,
            self.get_growth_factor(),
            self.get_backoff_factor(),
            self.get_growth_interval(),
        )

    def _remembered(self, optimizer: Optimizer, result: StepResult) -> StepResult:
        self._results[optimizer] = result
        return result


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _with_clipping(divisor: Tensor | None, norm: Tensor, max_norm: float) -> Tensor:
    # 1e-6 as in torch.nn.utils.clip_grad_norm_.
    clip = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    return clip if divisor is None else clip * divisor.to(clip.device, non_blocking=True)


def _check_max_norm(max_norm: float) -> None:
    if not is_number(max_norm):
        raise wrong_type("max_norm", "a number or None", max_norm)
    if not max_norm >= 0:
        raise wrong_value("max_norm", "a number not below 0, or None", max_norm)


def _refuse_float16(gradients: Sequence[Tensor]) -> None:
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise ValueError(
            "gradients: expected float32 or bfloat16, got float16, of which dividing by the scale would lose the small"
            " ones; keep the parameters in float32 under autocast, or take an optimizer with fused=True"
        )
