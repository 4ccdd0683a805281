"""The keys and values that a windowed layer remembers while it generates."""

from __future__ import annotations

import torch
from torch import Tensor

from dskernels import RopeTable, window_attention_decode


class WindowCache:
    """A rolling cache of the last keys and values of each sequence, for one attention layer.

    Token ``j`` of a sequence lies in slot ``j mod slots``. A windowed layer needs ``left + new_tokens`` slots however
    long the text becomes, one without a window ``max_tokens``. Sequences may be of different lengths. With ``rope``,
    keys are rotated once, at their absolute positions, on the way in. What is stored has no gradient.

    ::

        cache = WindowCache(batch, num_kv_heads, head_dim, window=(255, 0), rope=table)
        cache.append(k, v)  # the keys and values of new tokens, [B, Hkv, N, D]
        out = cache.attend(q)  # [B, Hq, N, D]: the new queries over all that they see

    Args:
        batch: sequences ``B``.
        num_kv_heads: key and value heads ``Hkv``.
        head_dim: components ``D`` of a key.
        window: ``(left, right)`` of the layer, inclusive; causal, so ``right`` is 0 or less. ``left`` None needs
            ``max_tokens``.
        max_tokens: the longest sequence that will come, at most the positions of ``rope``. Default: those, or no end.
        new_tokens: how many queries attend at once, at most. Default: 1.
        value_dim: components of a value. Default: ``head_dim``.
        rope: table by which keys and queries are rotated. Default: no rotation.
        dtype: of what is stored, for example bfloat16 for half the memory. Default: torch's default dtype.
        device: where it is stored. Default: torch's default device.

    Attributes:
        lengths: shape ``[B]``, int64: how many tokens of each sequence have been appended.
        slots: how many of them are remembered.

    Raises:
        ValueError: a size is below 1, the window is not causal, or nothing bounds the cache.

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
        left, right = window
        if right is None or right > 0:
            raise ValueError(f"window: expected a causal one, whose right bound is 0 or less, got {window}")
        if left is None and max_tokens is None:
            raise ValueError("max_tokens: expected a number where the window is unbounded, got None")
        # A negative left bound asks for keys that have not come yet; there is still a slot to write to.
        needed = None if left is None else max(left, 0) + new_tokens
        self.slots = min(bound for bound in (needed, max_tokens) if bound is not None)
        ends = (max_tokens, None if rope is None else rope.max_positions)
        self.max_tokens = min((end for end in ends if end is not None), default=None)
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
        """Whether nothing has been appended to any sequence."""
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
        count = k.shape[2] if k.dim() == 4 else 0
        for name, tensor, stored in (("k", k, self._keys), ("v", v, self._values)):
            expected = (*stored.shape[:2], count, stored.shape[3])
            if tensor.shape != expected:
                raise ValueError(f"{name}: expected shape {list(expected)}, got {list(tensor.shape)}")
        if counts is not None and (counts.shape != self.lengths.shape or counts.dtype != torch.int64):
            batch = self.lengths.shape[0]
            raise ValueError(f"counts: expected int64 of shape [{batch}], got {counts.dtype} of {list(counts.shape)}")
        ends = self.lengths + (count if counts is None else counts)
        self._check_end(ends, count)
        positions = self.lengths[:, None] + torch.arange(count, device=ends.device)
        kept = (positions < ends[:, None]) & (positions >= ends[:, None] - self.slots)
        if self.rope is not None:
            k = self.rope.rotate(k, torch.where(kept, positions, 0), dtype=self._keys.dtype)
        slots = torch.where(kept, positions % self.slots, self.slots)
        rows = torch.arange(ends.shape[0], device=ends.device)[:, None]
        for tensor, stored in ((k, self._keys), (v, self._values)):
            stored.transpose(1, 2)[rows, slots] = tensor.transpose(1, 2).to(stored.dtype)
        self.lengths = ends

    def _check_end(self, ends: Tensor, count: int) -> None:
        longest = self._longest + count
        if self.max_tokens is not None and longest > self.max_tokens:
            # Only now is it worth waiting for what may be less than the bound.
            longest = int(ends.max()) if ends.numel() else 0
            if longest > self.max_tokens:
                raise IndexError(f"k: expected sequences of up to {self.max_tokens} tokens, got {longest}")
        self._longest = longest

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
        """Forgets all sequences, or those of the int64 indices ``rows``, whose places others can take then."""
        if rows is None:
            self.lengths = torch.zeros_like(self.lengths)
            self._longest = 0
        else:
            self.lengths = self.lengths.index_fill(0, rows, 0)

    def reorder(self, rows: Tensor) -> None:
        """Sequence ``i`` becomes a copy of sequence ``rows[i]``, as beam search needs it.

        Args:
            rows: int64, any number of indices of sequences; the batch becomes as large.
        """
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        self.lengths = self.lengths.index_select(0, rows)
