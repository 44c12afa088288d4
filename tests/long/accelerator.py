"""`pretend:0`, an accelerator for machines without one: its tensors keep their data on the CPU.

    with PretendDevice() as device:
        model.to("pretend:0")
        ...
    device.waits, device.moved

Operations that mix devices are refused, as on a GPU. The host waits where it does in PyTorch's CUDA
backend: for a copy to the host, for a copy to the device without `non_blocking=True`, and for a
result whose size depends on the data. Speed, memory and the rounding of a GPU's kernels are not
imitated, and `to("cpu", non_blocking=True)` counts as waiting.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import minragen

PACKAGE = str(Path(minragen.__file__).parent)
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Numbers that the host reads, and results whose size it must know.
READS = {"_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "bincount",
         "repeat_interleave", "_unique2", "unique_dim", "unique_consecutive"}
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
WHOLE = {"linear", "matmul", "rms_norm", "scaled_dot_product_attention"}  # in parts they are slow


class PretendDevice(TorchDispatchMode):
    """Runs every operation on the CPU and records what the host does.

    waits: Counter of (line of minragen, operation)
    moved: list of (line of minragen, "copy to device" or "copy to host", elements)
    """

    def __init__(self):
        super().__init__()
        self.waits, self.moved = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name not in WHOLE and func.has_kernel_for_dispatch_key(COMPOSITE):
            with self:  # in inference mode such an operation arrives whole
                return func.decompose(*args, **kwargs)
        tensors, owners = [], {}  # of the arguments; data -> its Pretend

        def unwrap(x):
            if isinstance(x, torch.Tensor):
                tensors.append(x)
            if isinstance(x, Pretend):
                owners[id(x.data_on_cpu)] = x
                return x.data_on_cpu
            return torch.device("cpu") if isinstance(x, torch.device) else x

        def wrap(x):
            if not (on_device and isinstance(x, torch.Tensor)):
                return x
            return owners[id(x)] if id(x) in owners else Pretend(x)  # changed in place, or new

        plain = nested(unwrap, args), {key: nested(unwrap, x) for key, x in kwargs.items()}
        on_device = bool(owners)  # the result
        if name == "copy_":
            on_device = isinstance(args[0], Pretend)
            self.count_copy(args[1], on_device, kwargs.get("non_blocking") or any(args[2:]))
        elif kwargs.get("device") is not None:
            on_device = torch.device(kwargs["device"]).type == "pretend"
            if name == "_to_copy":
                self.count_copy(args[0], on_device, kwargs.get("non_blocking"))
        elif owners:
            self.check_devices(func, name, args, tensors)
            if name in READS or name in INDEXING and any(
                    x.dtype == torch.bool for x in args[1] if isinstance(x, Pretend)):
                self.waits[place(), name] += 1
        return nested(wrap, func(*plain[0], **plain[1]))

    def check_devices(self, func, name, args, tensors):
        """Refuse the CPU's tensors, except elementwise numbers and indices, which CUDA takes."""
        numbers = torch.Tag.pointwise in func.tags or name in INDEXING
        for x in tensors:
            if isinstance(x, Pretend) or numbers and x.dim() == 0:
                continue
            is_index = name in INDEXING and any(x is index for index in args[1])
            if not (is_index and isinstance(args[0], Pretend)):
                raise RuntimeError(f"{name} mixes devices: "
                                   f"{[(str(t.device), *t.shape) for t in tensors]}")
            self.count_copy(x, True)

    def count_copy(self, source, to_device, non_blocking=False):
        """Record a copy if it is one between the host and the device."""
        if isinstance(source, Pretend) != to_device:
            what = "copy to device" if to_device else "copy to host"
            self.moved.append((place(), what, source.numel()))
            if not (to_device and non_blocking):
                self.waits[place(), what] += 1


class Pretend(torch.Tensor):
    """A tensor that says it is on `pretend:0`. `data_on_cpu`: a plain tensor with its data."""

    @staticmethod
    def __new__(cls, data):
        with torch.inference_mode(data.is_inference()):  # else a view of a weight is refused
            wrapper = torch.Tensor._make_wrapper_subclass(
                cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(),
                dtype=data.dtype, device="pretend:0")
        wrapper.data_on_cpu = data
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with PretendDevice():  # outside of any other one: nobody reads what it counts
            return func(*args, **(kwargs or {}))

    # PyTorch has these for real tensors only. With the first two `Module.to` keeps ties.
    def __tensor_flatten__(self):
        return ["data_on_cpu"], None

    def __tensor_unflatten__(inner, *_):
        return Pretend(inner["data_on_cpu"])

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):
        return self.data_on_cpu.untyped_storage()

    def __reduce_ex__(self, protocol):
        return (torch._utils._rebuild_device_tensor_from_cpu_tensor,
                (self.cpu(), self.dtype, str(self.device), self.requires_grad))


def nested(function, x):
    """function(x), or of its parts where x is a list or tuple. (PyTorch's tree_map is slow.)"""
    if isinstance(x, (list, tuple)):
        return type(x)(nested(function, part) for part in x)
    return function(x)


def place():
    """The line of minragen that is running; "elsewhere" in a backward pass, which has none."""
    frame = sys._getframe()
    while frame and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "elsewhere"


def empty_strided(size, stride, dtype=None, **kwargs):
    return Pretend(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(source, target, non_blocking=False):
    _get_current_dispatch_mode().count_copy(source, True, non_blocking)
    target.data_on_cpu.copy_(source)
    return target


class Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self):
        return []  # torch.utils.checkpoint asks, on the CPU too


backend_registration._setup_privateuseone_for_python_backend("pretend", Backend())
# `torch.tensor(..., device=)` and lists as indices reach these two and no mode.
BACKEND = torch.library.Library("aten", "IMPL")
BACKEND.impl("empty_strided", empty_strided, "PrivateUse1")
BACKEND.impl("_copy_from", copy_from, "PrivateUse1")
# A checkpoint's data is loaded to the CPU; `__reduce_ex__` moves it from there.
torch.serialization.register_package(
    0, lambda storage: None, lambda storage, location: storage if "pretend" in location else None)
