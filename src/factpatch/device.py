"""Where models run."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from factpatch.errors import DeviceError, InputError

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

T = TypeVar("T")

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def find_device(name: str | None = None) -> torch.device:
    """The device asked for, or the best there is."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"expected a device such as cpu or cuda:0, found {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"expected a device such as cpu or cuda:0, found {name!r}, which this machine cannot use")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"{name} was asked for, but this machine has no usable CUDA GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"{name} was asked for, but this machine has {torch.cuda.device_count()} CUDA GPUs")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # which is what Accelerate takes
    return device


def find_dtype(precision: str | None, device: str | None = None) -> torch.dtype:
    """The precision asked for, or the device's: bf16 on a GPU, fp32 elsewhere."""
    precision = precision or ("bf16" if find_device(device).type == "cuda" else "fp32")
    if precision not in PRECISIONS:
        raise InputError(f"expected a precision out of {', '.join(PRECISIONS)}, found {precision!r}")
    return PRECISIONS[precision]


def surroundings(device: torch.device) -> dict[str, Any]:
    """What a result was found with, to be kept beside it."""
    import transformers

    from factpatch import __version__

    versions = {"factpatch": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"versions": versions, "device": name}


def onto(device: torch.device, values: NDArray[Any] | Sequence[int]) -> Tensor:
    """As a tensor there, without waiting for the device; pinned, so that the values last until they are copied."""
    tensor = torch.as_tensor(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def join_processes(device: torch.device) -> PartialState:
    """The processes that `accelerate launch` started together, of which this is one; or this one alone."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    atexit.register(_leave_processes)
    state = PartialState(cpu=device.type == "cpu")
    if state.device and state.device.type != device.type and not state.use_distributed:
        # An earlier run of this process was on another kind of device, which Accelerate would stay with.
        AcceleratorState._reset_state(reset_partial_state=True)
        state = PartialState(cpu=device.type == "cpu")
    return state


def accelerator_on(device: torch.device, **options: Any) -> Accelerator:
    """Accelerate for one run there, in all processes that were started together."""
    from accelerate import Accelerator

    join_processes(device)
    return Accelerator(cpu=device.type == "cpu", **options)


def from_first(value: T) -> T:
    """What the first process found, in all of them: near ties may fall differently in others."""
    from accelerate.utils import broadcast_object_list

    shared = [value]
    broadcast_object_list(shared)
    return shared[0]


def _leave_processes() -> None:
    """Before Python is taken down: one of gloo's threads that finds it gone would abort the process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def kernels_take(x: Tensor) -> bool:
    """Whether the kernels for a model's layers take it: half precision, on a GPU that they run on."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_kernels(x.device)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run on a GPU."""
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from factpatch.kernels import Norm

        one = torch.ones(16, device=device, dtype=torch.bfloat16)
        Norm.apply(one, one, one, 1e-5)
    except Exception:  # whatever Triton lacks to build them, such as a C compiler: torch's own kernels do
        return False
    return True


@contextmanager
def no_cudnn_attention() -> Iterator[None]:
    """Attention by torch's own kernels.

    cuDNN's, torch's first choice on recent GPUs, plans anew for every shape it meets, some ten milliseconds each; and
    for short texts it is slower even when it has planned.
    """
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


@contextmanager
def tensor_core_products() -> Iterator[None]:
    """float32 products by a GPU's tensor cores, with the exponents of float32 and ten bits of its fractions."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
