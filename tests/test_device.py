"""The choice of devices and CPU threads."""

from __future__ import annotations

import os

import pytest
import tiny
import torch

from factpatch.device import find_device, idle_cores, use_free_cores
from factpatch.errors import DeviceError


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cpu").type == "cpu"
    with pytest.raises(DeviceError, match="expected a device"):
        find_device("gpu9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no usable CUDA GPU; use --device cpu"):
        find_device("cuda")


def test_threads_suit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("factpatch.device.idle_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    use_free_cores(tiny.build("bert"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    use_free_cores(tiny.build("bert"))
    assert chosen == [7]


def test_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= idle_cores(0.01) <= len(os.sched_getaffinity(0))
    for after, idle in (([(110, 200), (200, 200), (190, 200)], 2), ([(100, 200)] * 3, 1)):
        times = iter([[(100, 100)] * 3, after])
        monkeypatch.setattr("factpatch.device._core_times", lambda times=times: next(times))
        assert idle_cores(0) == idle
