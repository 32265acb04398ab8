# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels on the fake GPU. A launch gives the current stream an operation. When the
runtime comes to it, Triton's interpreter runs the kernel on the host's view of the bytes. The
operation touches what the kernel loads, stores or adds to, by the addresses that it uses: also
those that it finds as numbers in other tensors.

A launch without a tensor on the GPU is left to the interpreter, as it is.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

BROKEN = 710
"""cudaErrorAssert: what all calls fail with once a kernel has failed."""
READS, WRITES = 0, 1


@cache
def runtime() -> Any:
    """Return the runtime that torch has loaded. Its calls keep Python's lock: they are short."""
    library = ctypes.PyDLL("libcudart.so.13")
    library.fake_gpu_reach.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 2 + [ctypes.c_int]
    library.fake_gpu_reach.restype = None
    return library


@cache
def _enqueue() -> Any:
    """Return what gives a stream a function; other operations may run in the call."""
    function = ctypes.CDLL("libcudart.so.13").fake_gpu_enqueue
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_char_p]
    return function


def take_first_choice(autotuner: ModuleType) -> None:
    """Have kernels with several ways take the first: no way is faster here."""
    autotuner.Autotuner._bench = lambda *_, **__: 0.0


class _Operations:
    """What streams were given and has not run, by number. The runtime knows the numbers alone: it
    drops operations where nobody may wait for Python's lock."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._work: dict[int, Callable[[], None]] = {}
        self._captured: set[int] = set()
        self._lock = threading.Lock()  # the interpreter has one grid
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._do)
        self._drop = ctypes.CDLL(None).abs

    def give(self, stream: int, name: str, work: Callable[[], None], *, captured: bool) -> None:
        number = next(self._numbers)
        self._work[number] = work
        if captured:
            self._captured.add(number)
        run, drop = (ctypes.cast(each, ctypes.c_void_p) for each in (self._run, self._drop))
        if code := _enqueue()(stream, run, drop, number, name.encode()):
            raise RuntimeError(f"Triton Error [CUDA]: error {code} of the fake GPU")

    def _do(self, number: int) -> None:
        work = self._work[number] if number in self._captured else self._work.pop(number)
        with self._lock:
            collects = gc.isenabled()
            gc.disable()  # tensors that go ask the runtime, in which this operation is at work
            try:
                work()
            except BaseException:  # on a GPU: a kernel that failed, and all calls fail from then on
                traceback.print_exc()
                runtime().fake_gpu_break(BROKEN)
            if collects:
                gc.enable()


def _reach(places: Any, mask: Any, item: int, how: int) -> Any:
    """Return where the host has the places; the operation at work touches those of ``mask``."""
    places = np.asarray(places, np.uint64, order="C")
    mask = np.asarray(np.broadcast_to(mask, places.shape), np.bool_, order="C")
    found = np.empty_like(places)
    where = (each.ctypes.data for each in (places, mask, found))
    runtime().fake_gpu_reach(*where, places.size, item, how)
    return found


def _reach_in(interpreter: ModuleType) -> None:
    """Have the interpreter's four functions that touch memory reach it on the host."""
    own = interpreter._interpreter
    patched = SimpleNamespace(**{name: getattr(own, name) for name in dir(own) if not name.startswith("__")})

    def load(places: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return own.load(_reach(places, mask, dtype.itemsize, READS), mask, other, dtype)

    def store(places: Any, value: Any, mask: Any) -> Any:
        return own.store(_reach(places, mask, value.dtype.itemsize, WRITES), value, mask)

    def atomic_rmw(how: Any, places: Any, value: Any, mask: Any, order: Any) -> Any:
        return own.atomic_rmw(how, _reach(places, mask, value.dtype.itemsize, WRITES), value, mask, order)

    def atomic_cas(places: Any, expected: Any, value: Any, order: Any) -> Any:
        return own.atomic_cas(_reach(places, True, value.dtype.itemsize, WRITES), expected, value, order)

    patched.load, patched.store, patched.atomic_rmw, patched.atomic_cas = load, store, atomic_rmw, atomic_cas
    interpreter._interpreter = patched


def _make_faster(interpreter: ModuleType) -> None:
    """Have the interpreter look up what it makes anew each time, and not look for overflows, as
    compiled kernels do not: half of its time."""
    make, known = interpreter._get_np_dtype, {}

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = make(kind)
        return known[name]

    interpreter._get_np_dtype = dtype_of
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_language_once(interpreter)


def _patch_language_once(interpreter: ModuleType) -> None:
    """Have the interpreter put its functions into Triton's language once, and leave them there: it
    does so at each launch and each call of a function, which takes longer than most kernels."""
    patch, done = interpreter._patch_lang, []

    def once(_: Any) -> Any:
        if not done:
            language = interpreter.tl
            patch(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
            done.append(True)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif hasattr(value, "data_ptr"):
            yield value
        elif hasattr(value, "base"):  # a descriptor
            yield value.base


@cache
def _named(function: Any) -> list[str]:
    return inspect.getfullargspec(function).args


def _launch(interpreter: ModuleType, executor: Any, given: Any, named: Any) -> None:
    """Give the current stream a kernel. Of tensors it takes the addresses alone, as a GPU does."""
    import torch

    named = {name: value for name, value in named.items() if name in _named(executor.fn)}
    for hook in executor.pre_run_hooks:
        hook(*given, **named)
    interpreter._patch_lang(executor.fn)
    values = inspect.getcallargs(executor.fn, *given, **named)
    grid = executor.grid(values) if callable(executor.grid) else executor.grid  # which may choose other values
    values = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in values.items()
    }
    x, y, z = (*grid, *(1,) * (3 - len(grid)))
    builder = interpreter.interpreter_builder

    def run() -> None:
        builder.set_grid_dim(x, y, z)
        with np.errstate(all="ignore"):
            for at in itertools.product(range(x), range(y), range(z)):
                builder.set_grid_idx(*at)
                executor.fn(**values)

    stream = torch.cuda.current_stream().cuda_stream
    name = f"triton {executor.fn.__name__}"
    _operations.give(stream, name, run, captured=torch.cuda.is_current_stream_capturing())


_operations = _Operations()


def run_as_operations(interpreter: ModuleType) -> None:
    """Have launches of Triton's interpreter give the fake GPU's streams operations."""
    _make_faster(interpreter)
    _reach_in(interpreter)
    at_once = interpreter.GridExecutor.__call__

    def call(executor: Any, *given: Any, **named: Any) -> None:
        if any(tensor.device.type == "cuda" for tensor in _tensors((*given, *named.values()))):
            _launch(interpreter, executor, given, named)
        else:
            at_once(executor, *given, **named)

    interpreter.GridExecutor.__call__ = call
