"""The clock and the fingerprint of a GPU, with a stand-in for it: what is done in which order, and what is asked."""

import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cuda, machine


class FakeGpu:
    """Stands for torch.cuda: keeps the order of what is done, and every pair of events lasts 3 ms."""

    def __init__(self, monkeypatch):
        self.log = []
        for name in ("synchronize", "_sleep"):
            monkeypatch.setattr(torch.cuda, name, lambda *a, name=name: self.log.append(name), raising=False)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self.log))
        properties = SimpleNamespace(L2_cache_size=100)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        buffer = SimpleNamespace(zero_=lambda: self.log.append("flush"))
        self.sizes = []
        monkeypatch.setattr(torch, "empty", lambda size, **options: self.sizes.append(size) or buffer)


class FakeEvent:
    def __init__(self, log):
        self._log = log

    def record(self):
        self._log.append("event")

    def elapsed_time(self, end):
        return 3.0


@pytest.mark.parametrize(
    ("launch", "estimate", "pair", "pairs", "seconds"),
    [
        ("flushed", 1e-3, ["flush", "_sleep", "event", "run", "event"], 10, 3e-3),
        ("flushed", 15e-3, ["flush", "_sleep", "event", "run", "event"], 1, 3e-3),
        ("queued", 0.25e-3, ["_sleep", "event", *4 * ["run"], "event"], 10, 0.75e-3),
        ("queued", 1e-9, ["_sleep", "event", *50 * ["run"], "event"], 10, 0.06e-3),
        ("eager", 1e-3, ["flush", "synchronize", "event", "run", "event"], 10, 3e-3),
    ],
    ids=["flushed", "flushed_long", "queued", "queued_short", "eager"],
)
def test_clock_prepares_what_a_caller_is_to_find(monkeypatch, launch, estimate, pair, pairs, seconds):
    gpu = FakeGpu(monkeypatch)
    clock = cuda.CudaClock(launch)
    assert gpu.sizes == [200]
    gpu.log.clear()
    turn = clock.turn(lambda: gpu.log.append("run"), estimate)
    # A call that is not timed, then the pairs, and one wait for all of them.
    assert gpu.log == ["synchronize", "run", "synchronize", *pairs * pair, "synchronize"]
    assert turn == pytest.approx([seconds] * pairs)


def test_clock_waits_for_the_gpu_around_an_estimate(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    clock = cuda.CudaClock("flushed")
    gpu.log.clear()
    moments = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    assert clock.call(lambda: gpu.log.append("run")) == 2.5
    assert gpu.log == ["synchronize", "run", "synchronize"]


def test_gpu_is_kept_busy_while_the_host_queues(monkeypatch):
    FakeGpu(monkeypatch)
    spins = []
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append, raising=False)
    monkeypatch.setattr(cuda, "_host_and_rest", lambda run: (1e-3, 0.0))
    clock = cuda.CudaClock("queued")
    spins.clear()
    clock.turn(lambda: None, 0.25e-3)
    # 10 million cycles took 3 ms; four calls need 4 ms of the host, and half of that more.
    assert set(spins) == {int(6e-3 * 10_000_000 / 3e-3)}
    spins.clear()
    monkeypatch.setattr(cuda, "_host_and_rest", lambda run: (10.0, 0.0))
    clock.turn(lambda: None, 1.0)
    assert spins == [int(cuda._LONGEST_PAUSE * 10_000_000 / 3e-3)]


def _properties(**fields):
    sizes = {"multi_processor_count": 132, "total_memory": 80 * 2**30, "L2_cache_size": 50 * 2**20}
    return SimpleNamespace(name="NVIDIA Example 80GB", **sizes, **fields)


@pytest.fixture
def gpu_properties(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _properties(uuid="12-34"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def _nvidia_smi(folder, monkeypatch, text):
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\n{text}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.usefixtures("gpu_properties")
def test_fingerprint_has_what_the_driver_says(tmp_path, monkeypatch):
    _nvidia_smi(tmp_path, monkeypatch, "echo '580.1, 1980 MHz, 1980 MHz, 2619 MHz, 700.00 W, 40, Enabled'")
    found = machine.fingerprint("cuda")["gpu"]
    assert found["name"] == "NVIDIA Example 80GB"
    assert (found["capability"], found["processors"], found["memory_gib"], found["l2_mib"]) == ([9, 0], 132, 80.0, 50.0)
    assert (found["driver"], found["sm_clock"], found["memory_clock"]) == ("580.1", "1980 MHz", "2619 MHz")
    assert (tmp_path / "asked").read_text().startswith("--id GPU-12-34 --query-gpu=driver_version,")


@pytest.mark.usefixtures("gpu_properties")
@pytest.mark.parametrize("text", ["exit 6", "echo 580.1", None], ids=["fails", "other_answer", "absent"])
def test_fingerprint_does_without_the_driver(tmp_path, monkeypatch, text):
    if text is None:
        monkeypatch.setattr(cuda.shutil, "which", lambda name: None)
    else:
        _nvidia_smi(tmp_path, monkeypatch, text)
    found = cuda.fingerprint()
    assert found["name"] == "NVIDIA Example 80GB"
    assert {found[key] for key in cuda._QUERIES} == {None}


def test_fingerprint_of_the_cpu_has_no_gpu():
    assert "gpu" not in machine.fingerprint()
