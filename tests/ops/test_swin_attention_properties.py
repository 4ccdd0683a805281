"""Properties that hold for every input of swin_attention, tried on inputs that hypothesis makes up."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swin_attention_oracle import Inputs, Options, Rope, draw, op, swin, with_gradients

# The fixture only names the backend, so that examples share it is harmless. No deadline: the machine may be busy.
many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
seeds = st.integers(0, 2**31)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20))
ropes = st.sampled_from([None, Rope(), Rope(rotary_dim=8, interleaved=True), Rope(by_head=True)])


@st.composite
def grids(draw_one) -> tuple[tuple[int, int], tuple[int, int]]:
    """A window and a shift."""
    window = draw_one(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    return window, draw_one(st.tuples(*(st.integers(0, side - 1) for side in window)))


def make(seed: int, size, grid, heads: int = 2, rope: Rope | None = None, **extra) -> tuple[Inputs, Options]:
    torch.manual_seed(seed)
    options = Options(*grid, heads, rope)
    return draw(size, 12, options, **extra)[0], options


def assert_near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@many
@given(seeds, sizes, grids(), st.integers(1, 4), ropes, st.booleans(), st.booleans())
def test_swins_own_steps(backend, seed, size, grid, heads, rope, cosine, attended) -> None:
    torch.manual_seed(seed)
    options = Options(*grid, heads, rope, padding="attend" if attended else "mask")
    inputs, grad_out = draw(size, 12, options, cosine=cosine, pad=attended)
    results = with_gradients(op, inputs, grad_out, options, backend)
    right = with_gradients(swin, inputs.double(), grad_out, options, torch.float64)
    for one, other in zip(results, right, strict=True):
        if one is not None:
            size_of = float(other.abs().max()) + 1
            torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5 * size_of)


@many
@given(seeds, sizes, grids(), ropes)
def test_images_do_not_know_each_other(backend, seed, size, grid, rope) -> None:
    inputs, options = make(seed, size, grid, rope=rope)
    out = op(inputs, options, backend)
    alone = [op(inputs._replace(qkv=inputs.qkv[i : i + 1]), options, backend) for i in range(size[0])]
    assert_near(out, torch.cat(alone))


@many
@given(seeds, sizes, grids(), st.permutations(range(3)))
def test_heads_do_not_know_each_other(backend, seed, size, grid, order) -> None:
    inputs, options = make(seed, size, grid, heads=3, cosine=True)
    out, order = op(inputs, options, backend), list(order)
    qkv = inputs.qkv.unflatten(-1, (3, 3, 12))[..., order, :].flatten(-3)
    shuffled = Inputs(qkv, inputs.bias[order], inputs.logit_scale[order])
    assert_near(op(shuffled, options, backend), out.unflatten(-1, (3, 12))[..., order, :].flatten(-2))


@many
@given(seeds, sizes, grids())
def test_an_output_is_an_average_of_values(backend, seed, size, grid) -> None:
    inputs, options = make(seed, size, grid)
    out, values = op(inputs, options, backend), inputs.qkv.chunk(3, -1)[2]
    assert (out <= values.amax((1, 2), keepdim=True) + 1e-5).all()
    assert (out >= values.amin((1, 2), keepdim=True) - 1e-5).all()


@many
@given(seeds, sizes, grids(), st.integers(1, 2), st.integers(1, 2))
def test_the_grid_goes_on_alike(backend, seed, size, grid, down, across) -> None:
    """An image moved by whole windows is cut as it was, but for the window in which it used to begin."""
    inputs, options = make(seed, size, grid, rope=Rope())
    top, left = down * options.window[0], across * options.window[1]
    larger = torch.nn.functional.pad(inputs.qkv, (0, 0, left, 0, top, 0), value=torch.nan)
    moved = op(inputs._replace(qkv=larger), options, backend)[:, top:, left:]
    rows, columns = (slice(shift, None) for shift in options.shift)
    assert_near(moved[:, rows, columns], op(inputs, options, backend)[:, rows, columns])


@many
@given(seeds, sizes, grids(), st.floats(-50, 50))
def test_a_constant_in_the_bias_changes_nothing(backend, seed, size, grid, constant) -> None:
    inputs, options = make(seed, size, grid, cosine=True)
    moved = inputs._replace(bias=inputs.bias + constant)
    assert_near(op(moved, options, backend), op(inputs, options, backend))


@many
@given(seeds, sizes, grids(), st.floats(0.01, 100))
def test_cosine_attention_knows_directions_alone(backend, seed, size, grid, factor) -> None:
    inputs, options = make(seed, size, grid, cosine=True, rope=Rope())
    scaled = torch.cat((inputs.qkv[..., :48] * factor, inputs.qkv[..., 48:]), -1)
    assert_near(op(inputs._replace(qkv=scaled), options, backend), op(inputs, options, backend))
