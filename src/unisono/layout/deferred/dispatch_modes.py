"""Dispatch modes that pass every tensor operation of a model's construction to the recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from unisono.layout.deferred.recorder import TapeRecorder


@contextmanager
def recording(recorder: TapeRecorder) -> Iterator[None]:
    """Pass all tensor operations of this thread to the recorder."""
    try:
        with _AttributeMode(recorder), _OperatorMode(recorder):
            yield
    finally:
        recorder.close()


class _OperatorMode(TorchDispatchMode):
    """Passes every operator to the recorder, below autograd."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._recorder.run_operator(func, args, kwargs or {})


class _AttributeMode(TorchFunctionMode):
    """Answers what code asks placeholders without calling an operator, such as their device."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        answer = _ANSWERS.get(func)
        if answer is not None and recorder.view_of(args[0]) is not None:
            return answer(recorder, *args, **kwargs)
        if func in _READS:
            with _disable_current_modes():
                return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            recorder.refuse("its own code creates tensors on the meta device")
        if func not in _SHARING:
            return func(*args, **kwargs)
        recorder.sharing = True
        try:
            return func(*args, **kwargs)
        finally:
            recorder.sharing = False


def _to(recorder: TapeRecorder, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    recorder.check_device(device)
    return tensor.to(dtype or tensor.dtype, copy=copy, memory_format=memory_format or torch.preserve_format)


def _array(recorder: TapeRecorder, tensor: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    with _disable_current_modes():
        array = recorder.read(tensor)[0].numpy()
    array.setflags(write=False)  # writes would not reach the tensor
    return array if dtype is None else array.astype(dtype)


def _list(recorder: TapeRecorder, tensor: Tensor) -> Any:
    with _disable_current_modes():
        return recorder.read(tensor)[0].tolist()


def _refusing(what: str) -> Callable[..., NoReturn]:
    return lambda recorder, *args, **kwargs: recorder.refuse(f"it {what}, and tensors have no memory yet")


_SHARING = {torch.from_numpy, torch.frombuffer, torch.as_tensor, torch.asarray}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda recorder, tensor: torch.device("cpu"),
    Tensor.is_cpu.__get__: lambda recorder, tensor: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda recorder, tensor: False,  # type: ignore[attr-defined]
    Tensor.cpu: lambda recorder, tensor, **kwargs: tensor,
    Tensor.to: _to,
    Tensor.tolist: _list,
    Tensor.numpy: lambda recorder, tensor, **kwargs: _array(recorder, tensor),
    Tensor.__array__: _array,
    Tensor.data_ptr: _refusing("asks for the address of a tensor"),
    Tensor.storage: _refusing("asks for the memory of a tensor"),
    Tensor.untyped_storage: _refusing("asks for the memory of a tensor"),
    Tensor.__reduce_ex__: _refusing("pickles a tensor"),
}
