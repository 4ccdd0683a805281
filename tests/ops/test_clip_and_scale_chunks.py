"""The table of chunks that the kernels for GPUs follow: every element of a list of tensors once."""

from __future__ import annotations

import pytest
import test_clip_and_scale as shared
import torch
from torch import Tensor

from dskernels.clip_and_scale.chunks import CHUNK, RUN_TYPES, chunks_of


def addresses_of(tensors: list[Tensor]) -> list[tuple[int, torch.dtype]]:
    """The place of every element, sorted."""
    places = []
    for tensor in tensors:
        offsets = torch.zeros(tensor.shape, dtype=torch.int64)
        for dim, stride in enumerate(tensor.stride()):
            steps = torch.arange(tensor.shape[dim]) * stride
            offsets += steps.view(-1, *(1,) * (tensor.ndim - dim - 1))
        addresses = tensor.data_ptr() + offsets.flatten() * tensor.element_size()
        places += [(address, tensor.dtype) for address in addresses.tolist()]
    return sorted(places, key=str)


@pytest.mark.parametrize("name", [name for name in shared.LISTS if "none" not in name])
def test_chunks_cover_every_element_once(name: str) -> None:
    tensors = [*shared.LISTS[name](), torch.randn(3, CHUNK + 5)[:, 2:-1], torch.randn(CHUNK + 2, 2)[:, 1]]
    table, groups = chunks_of(tensors)
    assert [group.first for group in groups] == [sum(g.chunks for g in groups[:i]) for i in range(len(groups))]
    assert len({(group.dtype, group.is_aligned) for group in groups}) == len(groups)
    found = []
    for group in groups:
        for address, count, stride, code in table[group.first : group.first + group.chunks].tolist():
            assert 1 <= count <= CHUNK
            assert code == RUN_TYPES[group.dtype]
            assert not group.is_aligned or (stride == 1 and address % 16 == 0)
            step = stride * group.dtype.itemsize
            found += [(address + i * step, group.dtype) for i in range(count)]
    assert sorted(found, key=str) == addresses_of(tensors)


@pytest.mark.parametrize(
    ("tensor", "chunks"),
    [
        (torch.empty(50, 40).t(), 1),
        (torch.empty(4, 3, 8, 8).to(memory_format=torch.channels_last), 1),
        (torch.empty(1000, 1, 3).expand(1000, 1, 3)[:, :, :2], 2),
        (torch.empty(100, 90)[:, :80], 100),
        (torch.empty(3).expand(200, 3), 3),
        (torch.empty(6, 50, 7)[:, 5:45:2, :4], 24),
    ],
    ids=["transposed", "channels_last", "few_columns", "long_rows", "expanded", "short_everywhere"],
)
def test_strided_tensors_take_few_chunks(tensor: Tensor, chunks: int) -> None:
    assert chunks_of([tensor]).table.shape == (chunks, 4)
