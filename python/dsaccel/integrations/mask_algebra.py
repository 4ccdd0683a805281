"""Finds the window that a mask function describes, by running it on symbols in place of indices.

A mask function says whether query ``q`` sees key ``k``: ``mask(batch, head, q, k) -> bool``, written for tensors of
indices. Run on symbols, one that only compares ``k - q`` with numbers ends as two bounds; whatever else it does with a
symbol shows that it is no window. Nothing is assumed about who wrote the function, and `torch.compile` traces all this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Window = tuple[int | None, int | None]


def window_of(mask_function: Callable[..., Any]) -> Window | None:
    """The ``(left, right)`` of `dskernels.window_attention` for which ``mask_function`` is the mask, or None.

    Args:
        mask_function: ``(batch, head, query, key) -> bool`` over indices that are not negative.
    """
    try:
        # Batch and head are plain numbers: what depends on them looks something up in a tensor, and shows so.
        seen = mask_function(0, 0, _Index(0, 1, 0), _Index(1, 0, 0))
    except (_NotAWindowError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return (seen.left, seen.right) if isinstance(seen, _Seen) else None


class _NotAWindowError(Exception):
    pass


class _Seen:
    """The keys ``q - left .. q + right``, as the result of a comparison; None is unbounded."""

    device = None

    def __init__(self, left: int | None, right: int | None) -> None:
        self.left = left
        self.right = right

    def __and__(self, other: Any) -> _Seen:
        if not isinstance(other, _Seen):
            raise _NotAWindowError
        return _Seen(_nearer(self.left, other.left), _nearer(self.right, other.right))

    def to(self, device: None) -> _Seen:
        return self


class _Index:
    """``key * k + query * q + constant``."""

    def __init__(self, key: int, query: int, constant: int) -> None:
        self.key = key
        self.query = query
        self.constant = constant

    def __add__(self, other: Any) -> _Index:
        other = _as_index(other)
        return _Index(self.key + other.key, self.query + other.query, self.constant + other.constant)

    def __sub__(self, other: Any) -> _Index:
        other = _as_index(other)
        return _Index(self.key - other.key, self.query - other.query, self.constant - other.constant)

    def __abs__(self) -> _Distance:
        if self.key * self.query != -1 or self.constant != 0:
            raise _NotAWindowError
        return _Distance()

    def __le__(self, other: Any) -> _Seen:
        form = self - other
        if form.key == 1 and form.query == -1:
            return _Seen(None, -form.constant)
        if form.key == -1 and form.query == 1:
            return _Seen(-form.constant, None)
        # True of every query and key: 0 is their least value.
        if form.key <= 0 and form.query <= 0 and form.constant <= 0:
            return _Seen(None, None)
        raise _NotAWindowError

    def __ge__(self, other: Any) -> _Seen:
        return (_as_index(other) - self).__le__(0)

    def __lt__(self, other: Any) -> _Seen:
        return (self + 1).__le__(other)

    def __gt__(self, other: Any) -> _Seen:
        return (self - 1).__ge__(other)

    def __eq__(self, other: object) -> bool:
        # Without this one a comparison would be of identities.
        raise _NotAWindowError

    def new_ones(self, size: Any, dtype: Any = None) -> _Seen:
        return _Seen(None, None)


class _Distance:
    """``|k - q|``."""

    def __le__(self, other: Any) -> _Seen:
        if type(other) is not int:
            raise _NotAWindowError
        return _Seen(other, other)

    def __lt__(self, other: Any) -> _Seen:
        if type(other) is not int:
            raise _NotAWindowError
        return _Seen(other - 1, other - 1)


def _as_index(value: Any) -> _Index:
    if isinstance(value, _Index):
        return value
    if type(value) is not int:
        raise _NotAWindowError
    return _Index(0, 0, value)


def _nearer(bound: int | None, other: int | None) -> int | None:
    if bound is None or other is None:
        return other if bound is None else bound
    return min(bound, other)
