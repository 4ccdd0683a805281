"""Static quantization: observe the activations of a model, then convert it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from dsaccel.quant.arguments import Filter, check_filter, check_layer
from dsaccel.quant.observers import MinMaxObserver, Observer
from dsaccel.quant.report import QuantizationReport
from dsaccel.quant.survey import replace_linears
from dskernels.checks import wrong_type, wrong_value


class ObservedLinear(nn.Linear):
    """`nn.Linear`, whose inputs an observer takes in before the layer computes as ever.

    Args:
        linear: its parameters are kept, the same objects.
        observer: of the inputs.
        name: how errors call the layer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``linear`` is of a subclass with a forward of its own.
    """

    def __init__(self, linear: nn.Linear, observer: Observer, name: str = "") -> None:
        check_layer("linear", linear, nn.Linear)
        if not isinstance(observer, Observer):
            raise wrong_type("observer", "an Observer", observer)
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.observer = observer.to(linear.weight.device)
        self.name = name

    def forward(self, input: Tensor) -> Tensor:
        """What `nn.Linear` computes.

        Raises:
            ValueError: ``input`` has values that are not finite; the message names the layer.
        """
        try:
            self.observer(input)
        except ValueError as error:
            raise ValueError(f"{self.name or 'ObservedLinear'}: {error}") from error
        return F.linear(input, self.weight, self.bias)


def prepare(
    model: nn.Module,
    scheme: str = "int8_static",
    *,
    observer: Callable[[], Observer] = MinMaxObserver,
    filter: Filter | None = None,
) -> QuantizationReport:
    """Lets each `nn.Linear` in ``model`` observe its inputs, in place, until `convert`::

        prepare(model, observer=HistogramObserver)
        for batch in batches:  # a few hundred inputs like those to come
            model(batch)
        print(convert(model))

    Every forward is observed, in training and inference. The model computes what it did; its parameters stay the same
    objects under the same names. Which layers are kept, and what else is to be known, is as with `quantize_`.

    Args:
        model: any module.
        scheme: ``int8_static``, the one scheme that has to be calibrated.
        observer: makes an observer for a layer: a class, or for example ``lambda: PercentileObserver(99.99)``.
            Default: `MinMaxObserver`.
        filter: as in `quantize_`.

    Returns:
        What became of each layer.

    Raises:
        TypeError: an argument has the wrong type, or ``observer`` does not make observers.
        ValueError: ``scheme`` is another.
    """
    if scheme != "int8_static":
        raise wrong_value("scheme", "int8_static (the others need no calibration: quantize_)", repr(scheme))
    check_filter(filter)
    if not callable(observer) or not isinstance(observer(), Observer):
        raise wrong_type("observer", "a function that makes an Observer", observer)

    def observed(linear: nn.Linear, name: str) -> nn.Module:
        return ObservedLinear(linear, observer(), name)

    return replace_linears(model, observed, "observed", filter)
