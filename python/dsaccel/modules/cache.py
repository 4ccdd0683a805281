"""The keys and values that a windowed layer remembers while it generates."""

from __future__ import annotations

import torch
from torch import Tensor

from dskernels import RopeTable, window_attention_decode
from dskernels.checks import is_readable


class WindowCache:
    """A rolling cache of the last keys and values of each sequence, for one attention layer.

    Token ``j`` of a sequence lies in slot ``j mod slots``. A windowed layer needs ``left + new_tokens`` slots however
    long the text becomes, one without a window ``max_tokens``. Sequences may be of different lengths. With ``rope``,
    keys are rotated once, at their absolute positions, on the way in. What is stored has no gradient. One that is made
    under ``torch.inference_mode`` can be used only there.

    ::

        cache = WindowCache(batch, num_kv_heads, head_dim, window=(255, 0), rope=table)
        cache.append(k, v)  # the keys and values of new tokens, [B, Hkv, N, D]
        out = cache.attend(q)  # [B, Hq, N, D]: the new queries over all that they see

    Args:
        batch: sequences ``B``; 0 or more.
        num_kv_heads: key and value heads ``Hkv``.
        head_dim: components ``D`` of a key.
        window: ``(left, right)`` of the layer, inclusive; causal, so ``right`` is 0 or less. ``left`` None needs
            ``max_tokens``.
        max_tokens: the longest sequence that will come. Default, and at most: the positions of ``rope``; without
            ``rope`` there is no end.
        new_tokens: how many queries attend at once, at most. Default: 1.
        value_dim: components of a value. Default: ``head_dim``.
        rope: table by which keys and queries are rotated. Default: no rotation.
        dtype: of what is stored, float32, bfloat16, float16 or float64; bfloat16 takes half the memory of float32.
            Default: torch's default dtype.
        device: where it is stored. Default: torch's default device.

    Attributes:
        lengths: shape ``[B]``, int64: how many tokens of each sequence have been appended.
        slots: how many of them are remembered.

    Raises:
        ValueError: a size is too small, the window is not causal, nothing bounds the cache, the dtype is none of the
            four, or ``rope`` rotates more components than a key has.

    Source: the rolling buffer cache of Jiang et al., "Mistral 7B", 2023, section 2.
    """

    lengths: Tensor

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: tuple[int | None, int | None],
        max_tokens: int | None = None,
        new_tokens: int = 1,
        value_dim: int | None = None,
        rope: RopeTable | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "new_tokens": new_tokens, "value_dim": value_dim}
        for name, value in {**sizes, "max_tokens": max_tokens}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        if batch < 0:
            raise ValueError(f"batch: expected a number not below 0, got {batch}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ValueError(f"dtype: expected float32, bfloat16, float16 or float64, got {dtype}")
        if rope is not None and rope.rotary_dim > head_dim:
            raise ValueError(f"rope: expected rotary_dim up to head_dim = {head_dim}, got {rope.rotary_dim}")
        left, right = window
        if right is None or right > 0:
            raise ValueError(f"window: expected a causal one, whose right bound is 0 or less, got {window}")
        ends = (max_tokens, None if rope is None else rope.max_positions)
        self.max_tokens = min((end for end in ends if end is not None), default=None)
        if left is None and self.max_tokens is None:
            raise ValueError("max_tokens: expected a number where neither window nor rope has an end, got None")
        # A negative left bound asks for keys that have not come yet; there is still a slot to write to.
        needed = None if left is None else max(left, 0) + new_tokens
        self.slots = min(bound for bound in (needed, self.max_tokens) if bound is not None)
        self.window, self.new_tokens, self.rope = window, new_tokens, rope
        # One slot more than are used takes what is not to be kept, so that nobody has to wait for the lengths.
        self._keys, self._values = (
            torch.zeros(batch, num_kv_heads, self.slots + 1, width, dtype=dtype, device=device)
            for width in (head_dim, value_dim)
        )
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=self._keys.device)
        # The longest length, or more where it is not known here: reading it from a GPU would wait.
        self._longest = 0

    @property
    def keys(self) -> Tensor:
        """The stored keys, shape ``[B, Hkv, slots, D]``; rotated if there is a ``rope``."""
        return self._keys[:, :, : self.slots]

    @property
    def values(self) -> Tensor:
        """The stored values, shape ``[B, Hkv, slots, Dv]``."""
        return self._values[:, :, : self.slots]

    @property
    def is_empty(self) -> bool:
        """Whether no sequence has any token; on a GPU, only whether that is known without waiting."""
        return self._longest == 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self._keys.nbytes + self._values.nbytes

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> None:
        """Stores the keys and values of the next tokens; of more than ``slots``, the last.

        Args:
            k: shape ``[B, Hkv, N, D]``, not rotated.
            v: shape ``[B, Hkv, N, Dv]``.
            counts: int64, shape ``[B]``: how many of the ``N`` tokens belong to each sequence, from the first on; the
                rest is padding. Default: all.

        Raises:
            ValueError: shapes do not fit the cache.
            IndexError: a sequence becomes longer than ``max_tokens`` or the table of ``rope``.
        """
        self._check_new(k, v, counts)
        count = k.shape[2]
        ends = self.lengths + (count if counts is None else counts)
        self._note_longest(ends, self._longest + count)
        positions = self.lengths[:, None] + torch.arange(count, device=ends.device)
        if counts is None and count > self.slots:
            # The rest would be rotated and moved for nothing.
            k, v, positions = k[:, :, -self.slots :], v[:, :, -self.slots :], positions[:, -self.slots :]
        kept = (positions < ends[:, None]) & (positions >= ends[:, None] - self.slots)
        if self.rope is not None:
            k = self.rope.rotate(k, torch.where(kept, positions, 0), dtype=self._keys.dtype)
        slots = torch.where(kept, positions % self.slots, self.slots)
        rows = torch.arange(ends.shape[0], device=ends.device)[:, None]
        for tensor, stored in ((k, self._keys), (v, self._values)):
            stored.transpose(1, 2)[rows, slots] = tensor.transpose(1, 2).to(stored.dtype)
        self.lengths = ends

    def _check_new(self, k: Tensor, v: Tensor, counts: Tensor | None) -> None:
        count = k.shape[2] if isinstance(k, Tensor) and k.dim() == 4 else 0
        for name, tensor, stored in (("k", k, self._keys), ("v", v, self._values)):
            expected = (*stored.shape[:2], count, stored.shape[3])
            if not isinstance(tensor, Tensor) or tensor.shape != expected or not tensor.is_floating_point():
                got = f"{tensor.dtype} of {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
                raise ValueError(f"{name}: expected floating point of shape {list(expected)}, got {got}")
        if counts is None:
            return
        if not isinstance(counts, Tensor) or counts.shape != self.lengths.shape or counts.dtype != torch.int64:
            got = f"{counts.dtype} of {list(counts.shape)}" if isinstance(counts, Tensor) else repr(counts)
            raise ValueError(f"counts: expected int64 of shape [{self.lengths.shape[0]}], got {got}")
        if is_readable(counts) and not bool(((counts >= 0) & (counts <= count)).all()):
            raise ValueError(f"counts: expected 0 to {count}, the number of tokens that came, got {counts.tolist()}")

    def _note_longest(self, lengths: Tensor, bound: int) -> None:
        """Keeps the longest length in mind, or a bound of it where it would have to be waited for."""
        if is_readable(lengths) or (self.max_tokens is not None and bound > self.max_tokens):
            bound = int(lengths.max()) if lengths.numel() else 0
        if self.max_tokens is not None and bound > self.max_tokens:
            raise IndexError(f"k: expected sequences of up to {self.max_tokens} tokens, got {bound}")
        self._longest = bound

    def attend(
        self, q: Tensor, *, sink: Tensor | None = None, softcap: float | None = None, scale: float | None = None
    ) -> Tensor:
        """`dskernels.window_attention_decode` of the last tokens that were appended.

        Args:
            q: shape ``[B, Hq, N, D]`` with ``N`` up to ``new_tokens``, not rotated; the last tokens of each sequence.
            sink, softcap, scale: as in `dskernels.window_attention`.

        Returns:
            Shape ``[B, Hq, N, Dv]``, dtype of ``q``.

        Raises:
            ValueError: there are more than ``new_tokens`` queries, or as `dskernels.window_attention_decode`.
        """
        if q.dim() == 4 and q.shape[2] > self.new_tokens:
            raise ValueError(f"q: expected up to new_tokens = {self.new_tokens} queries, got {q.shape[2]}")
        return window_attention_decode(
            q,
            self.keys,
            self.values,
            self.lengths,
            window=self.window,
            rope=self.rope,
            keys_rotated=self.rope is not None,
            sink=sink,
            softcap=softcap,
            scale=scale,
        )

    def reset(self, rows: Tensor | None = None) -> None:
        """Forgets all sequences, or some, whose places others can take then.

        Args:
            rows: int64 ``[n]``, indices of sequences. Default: all.

        Raises:
            ValueError: ``rows`` is something else.
        """
        if rows is None:
            self.lengths = torch.zeros_like(self.lengths)
            self._longest = 0
            return
        _check_rows(rows)
        self.lengths = self.lengths.index_fill(0, rows, 0)
        self._note_longest(self.lengths, self._longest)

    def reorder(self, rows: Tensor) -> None:
        """Sequence ``i`` becomes a copy of sequence ``rows[i]``, as beam search needs it.

        Args:
            rows: int64 ``[n]``, indices of sequences; the batch becomes ``n``.

        Raises:
            ValueError: ``rows`` is something else.
        """
        _check_rows(rows)
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        self.lengths = self.lengths.index_select(0, rows)
        self._note_longest(self.lengths, self._longest)


def _check_rows(rows: Tensor) -> None:
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        got = f"{rows.dtype} of {list(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
        raise ValueError(f"rows: expected int64 of shape [n], got {got}")
