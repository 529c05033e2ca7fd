"""Profiles a training step kernel by kernel, and times it without some of factpatch's own kernels.

python tools/profile_step.py --shape minilm --edits 128 --without product
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from factpatch import bench, constraints, engine
from factpatch.device import find_device
from factpatch.editors.registry import find_method
from factpatch.models import TaskModel
from factpatch.models.gpu import FrozenNorm
from factpatch.processes import accelerator_on
from factpatch.training import TrainConfig
from factpatch.training.objective import Objective
from factpatch.training.step import Learner

KERNELS = ("attention", "norm", "product", "divergence")
WARM, TIMED, PROFILED = 4, 10, 3  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="minilm", choices=bench.SHAPES)
    parser.add_argument("--edits", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--without", nargs="*", default=[], choices=KERNELS)
    parser.add_argument("--lines", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = bench.shaped_model(options.shape)
    leave_out(options.without, model)
    config = TrainConfig(edits=options.edits, rows=options.rows, max_tokens=options.tokens)
    batch = bench.random_step(model, options.edits, options.rows, options.tokens)
    with torch.no_grad():
        objective = Objective(model, config, bench.kept_features(model, batch))
    learner = Learner(
        find_method(config.method).load_class().for_model(model), config, objective, accelerator_on(model.device)
    )

    def run(steps: int) -> float:
        """Returns milliseconds per step."""
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            learner.step([batch])
        wait()
        return 1000 * (time.perf_counter() - start) / steps

    run(WARM)
    print(f"{options.shape}, without {options.without or 'nothing'}: {run(TIMED):.2f} ms per step")
    on_gpu = model.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]) as found:
        run(PROFILED)
    times = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e) for e in found.key_averages()]
    times = sorted(((us / 1000 / PROFILED, e) for us, e in times if us > 0), key=lambda pair: -pair[0])
    print(f"{sum(ms for ms, _ in times):.2f} ms in {sum(e.count for _, e in times) // PROFILED} calls")
    for ms, event in times[: options.lines]:
        print(f"{ms:8.3f} {event.count // PROFILED:5d}  {event.key[:120]}")


def leave_out(names: list[str], model: TaskModel) -> None:
    """Replaces these kernels with torch's own."""
    if "attention" in names:
        model.model.set_attn_implementation("sdpa")
    if "norm" in names:
        for module in model.model.modules():
            if isinstance(module, FrozenNorm):
                module.__class__ = type(module).__bases__[1]  # the norm's own class
    if "product" in names:
        engine._has_kernel = lambda layer, x, factor: False
    if "divergence" in names:
        constraints.kernels_support = lambda x: False


def wait() -> None:
    if find_device().type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
