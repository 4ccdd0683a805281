"""AutocastPolicy chooses what the device supports, says why, and is torch.autocast otherwise."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsaccel.amp import AutocastPolicy


def pretend(monkeypatch: pytest.MonkeyPatch, device: str, *, there: bool = True, bf16: bool = True) -> None:
    module = SimpleNamespace(is_available=lambda: there, is_bf16_supported=lambda including_emulation: bf16)
    monkeypatch.setattr(torch, device, module)
    monkeypatch.setattr(torch, "get_device_module", lambda name: getattr(torch, name))


@pytest.mark.parametrize("device", ["cuda", "xpu"])
@pytest.mark.parametrize(
    ("there", "bf16", "dtype", "reason"),
    [
        (True, True, torch.bfloat16, "its hardware has it"),
        (True, False, torch.float16, "its hardware has no bfloat16; needs loss scaling"),
        (False, True, torch.float32, "there is none"),
    ],
    ids=["bf16", "fp16", "none"],
)
def test_by_the_hardware(monkeypatch, device: str, there: bool, bf16: bool, dtype: torch.dtype, reason: str) -> None:
    pretend(monkeypatch, device, there=there, bf16=bf16)
    policy = AutocastPolicy(device=torch.device(device, 1))
    assert policy.choice == (device, dtype, reason)
    assert policy.needs_loss_scaling == (dtype == torch.float16)


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ("AVX512", torch.bfloat16, "the processor has AVX-512"),
        ("AVX2", torch.float32, "bfloat16 would be slower: the processor has no AVX-512"),
    ],
)
def test_by_the_processor(monkeypatch, capability: str, dtype: torch.dtype, reason: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    choice = AutocastPolicy(device="cpu").choice
    assert choice == ("cpu", dtype, reason)
    assert str(choice) == f"{str(dtype)[6:]} on cpu: {reason}"


def test_default_device_is_the_accelerator_if_there_is_one(monkeypatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert AutocastPolicy().choice.device == "cpu"
    pretend(monkeypatch, "cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    assert AutocastPolicy().choice == ("cuda", torch.bfloat16, "its hardware has it")


def test_other_devices(monkeypatch) -> None:
    pretend(monkeypatch, "mps")
    default = torch.get_autocast_dtype("mps")
    assert AutocastPolicy(device="mps").choice == ("mps", default, "torch's default there")
    assert AutocastPolicy(device="meta").choice == ("meta", torch.float32, "torch has no autocast for it")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_explicit_dtype_is_taken_or_an_error(monkeypatch, dtype: torch.dtype) -> None:
    assert AutocastPolicy(device="cpu", dtype=dtype).choice == ("cpu", dtype, "asked for")
    pretend(monkeypatch, "cuda", there=False)
    for device, reason in (("cuda", "there is none"), ("meta", "torch has no autocast for it")):
        with pytest.raises(
            RuntimeError, match=rf"dtype: expected float32 or None on {device} \({reason}\), got {dtype}"
        ):
            AutocastPolicy(device=device, dtype=dtype).autocast()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_context_and_decorator(dtype: torch.dtype) -> None:
    a = torch.randn(3, 3)
    policy = AutocastPolicy(dtype=dtype, device="cpu", cache=False)
    with policy.autocast():
        assert (a @ a).dtype == dtype
        assert not torch.is_autocast_cache_enabled()
        with policy.autocast():
            assert (a @ a).dtype == dtype
        with AutocastPolicy(enabled=False, device="cpu").autocast():
            assert (a @ a).dtype == torch.float32
    assert (a @ a).dtype == torch.float32

    @policy.autocast()
    def product() -> torch.Tensor:
        return a @ a

    assert product().dtype == dtype


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (AutocastPolicy(enabled=False, device="cpu"), "enabled is False"),
        (AutocastPolicy(enabled=False, device="meta", dtype=torch.float16), "enabled is False"),
        (AutocastPolicy(dtype=torch.float32, device="cpu"), "asked for"),
        (AutocastPolicy(device="meta"), "torch has no autocast for it"),
    ],
    ids=["disabled", "disabled-dtype", "float32", "meta"],
)
def test_float32_is_no_autocast(policy: AutocastPolicy, reason: str) -> None:
    assert policy.choice[1:] == (torch.float32, reason)
    assert not policy.needs_loss_scaling
    with policy.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_prepare_keeps_norms_and_the_list() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Bilinear(2, 2, 2))
    assert AutocastPolicy(keep=(nn.Linear,)).prepare(model).kept == ("0", "1")


def test_is_a_value() -> None:
    policy = AutocastPolicy(dtype=torch.bfloat16, device="cpu", keep=(nn.Linear,))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(dataclasses.replace(policy)) == hash(policy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.enabled = False


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "bfloat16"], ids=str)
def test_other_dtypes_are_errors(dtype) -> None:
    with pytest.raises(ValueError, match=f"dtype: expected one of torch.bfloat16, .* or None, got {dtype}"):
        AutocastPolicy(dtype=dtype)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    choice = AutocastPolicy().choice
    assert choice.device == "cuda"
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert choice.dtype == (torch.bfloat16 if native else torch.float16)
    a = torch.randn(3, 3, device="cuda")
    with AutocastPolicy().autocast():
        assert (a @ a).dtype == choice.dtype
