"""The embedding over rows of int8 codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dskernels as dk
from dsaccel.quant.arguments import check_layer
from dsaccel.quant.codes import HoldsCodes
from dskernels.checks import wrong_type, wrong_value

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class QuantizedEmbedding(HoldsCodes):
    """`nn.Embedding` with int8 rows: ``out[i] = scale[ids[i]] * qweight[ids[i]]``, in float32, rounded once.

    The rows of an embedding are the rows of a linear layer's weight, so that the head of a language model and the
    embedding that it is tied to can share one weight: ``QuantizedEmbedding(head.weight)``. They go on sharing it when
    copied, pickled, cast, or loaded in place; moved to another device, each of the two moves its own.

    The state dict holds ``qweight``, int8 ``[num_embeddings, embedding_dim]``, and ``scale``, float32
    ``[num_embeddings]``; both keep their dtypes whatever the model is cast to. Nothing is differentiated.

    Args:
        weight: of scheme ``int8_weight_only``, or another of int8, whose codes are the same; its tensors are kept, not
            copied.
        padding_idx: only kept, for whoever asks. Default: none.
        dtype: of the result, a floating point dtype; it follows ``model.half()`` and the like, as that of
            `nn.Embedding` does. Default: torch's default dtype.

    Attributes:
        num_embeddings, embedding_dim, padding_idx: as in `nn.Embedding`.

    Raises:
        TypeError: ``weight`` is no `dskernels.QuantizedWeight`.
        ValueError: ``weight`` is not of int8, or ``dtype`` is no floating point dtype.
    """

    scheme = "int8_weight_only"
    qweight: Tensor
    scale: Tensor
    _like: Tensor

    def __init__(
        self, weight: dk.QuantizedWeight, *, padding_idx: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if not isinstance(weight, dk.QuantizedWeight):
            raise wrong_type("weight", "a QuantizedWeight", weight)
        if not weight.scheme.startswith("int8"):
            raise wrong_value("weight", "a QuantizedWeight of int8", weight.scheme)
        if weight.input_order is not None:
            raise wrong_value("weight", "columns in their own order", "one with input_order")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in _DTYPES:
            raise wrong_value("dtype", "float32, bfloat16, float16 or float64", dtype)
        self.num_embeddings = weight.out_features
        self.embedding_dim = weight.in_features
        self.padding_idx = padding_idx
        self.register_buffer("qweight", weight.qweight)
        self.register_buffer("scale", weight.scale)
        # Casts of the model reach it, and so the dtype of the result.
        self.register_buffer("_like", torch.empty(0, dtype=dtype, device=weight.qweight.device), persistent=False)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding) -> QuantizedEmbedding:
        """The embedding with the rows of ``embedding`` rounded to int8, and its dtype.

        Raises:
            TypeError: ``embedding`` is no `nn.Embedding`.
            ValueError: it is of a subclass with a forward of its own, renormalises its rows (``max_norm``), or has some
                that are not finite.
        """
        check_layer("embedding", embedding, nn.Embedding)
        if embedding.max_norm is not None:
            raise wrong_value("embedding", "max_norm=None, as codes are not written again", embedding.max_norm)
        weight = dk.quantize_weight(embedding.weight, "int8_weight_only")
        new = cls(weight, padding_idx=embedding.padding_idx, dtype=embedding.weight.dtype)
        return new.train(embedding.training)

    @property
    def weight(self) -> dk.QuantizedWeight:
        """The weight, over the layer's own tensors."""
        return dk.QuantizedWeight(self.scheme, self.qweight, self.scale, self.embedding_dim, self.embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows ``[..., embedding_dim]`` for ids ``[...]``, int64 or int32."""
        rows = F.embedding(ids, self.qweight).to(torch.float32)
        scale = F.embedding(ids, self.scale[:, None])
        return (rows * scale).to(self._like.dtype)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, scheme={self.scheme}"
