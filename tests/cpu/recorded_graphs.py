"""Stand-ins for a device's graphs and copies, which fail where a real device would compute nonsense."""
# triton has no types
# mypy: disable-error-code="import-untyped"

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ramify.engine.execution.step_graphs import CapturedStep, Outputs

T = TypeVar("T")
# A call: its operation, and what it was given: tensors by where they come from, other values as they are.
Call = tuple[str, tuple[Any, ...]]


class CallRecorder(TorchDispatchMode):
    """Records the calls of a function, or compares them with those of another run.

    A tensor that a call of the run has made is named by that call; any other one by its address,
    shape, strides and type, which a graph freezes.
    """

    def __init__(self, expected: Sequence[Call] | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._expected = expected
        self._made: dict[int, tuple[int, int]] = {}  # by id of the tensor: call, output
        self._alive: list[Any] = []  # so that no id is given twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        assert "_local_scalar_dense" not in name, "the host waits for a value in a captured step"
        assert not _has_shape_of_values(name, args), "the host waits for a shape in a captured step"
        assert "lift_fresh" not in name, "a captured step copies a Python value to the device"
        index = self.record(name, (*args, *sorted((kwargs or {}).items())))
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, list | tuple) else [result]
        for at, output in enumerate(outputs):
            if isinstance(output, Tensor) and id(output) not in self._made:
                self._made[id(output)] = index, at
                self._alive.append(output)
        return result

    def __enter__(self) -> Self:
        RECORDERS.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        RECORDERS.pop()
        super().__exit__(*error)

    def record(self, name: str, arguments: Sequence[Any]) -> int:
        """Record a call, or compare it; returns its number."""
        call, index = (name, tuple(map(self._describe, arguments))), len(self.calls)
        self.calls.append(call)
        if self._expected is not None:
            assert index < len(self._expected), f"call {index} is new: {call}"
            wanted = self._expected[index]
            assert call == wanted, f"call {index} differs: {call}, captured was {wanted}"
        return index

    def _describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self._made:
                return "made", *self._made[id(value)]
            self._alive.append(value)
            if value.layout is not torch.strided:  # weights that oneDNN has packed
                return "packed", tuple(value.shape)
            place = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
            return "at", *place
        if isinstance(value, list | tuple):
            return tuple(map(self._describe, value))
        return repr(value)


def _has_shape_of_values(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the shape of a result depends on values: those that are not zero, or where a mask is true."""
    indices = args[1] if "aten.index" in name and len(args) > 1 else ()
    is_masked = isinstance(indices, list | tuple) and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in indices
    )
    return is_masked or "nonzero" in name or "masked_select" in name


RECORDERS: list[CallRecorder] = []  # of the functions that run, the innermost last


def recorded_call(name: str, arguments: Sequence[Any], compute: Callable[[], T]) -> T:
    """A call of a kernel, as one call: addresses and Python values, all of which a graph freezes.

    What stands in for the kernel reads and writes tensors in ways of its own, which is not recorded.
    """
    if RECORDERS:
        RECORDERS[-1].record(name, arguments)
    with _disable_current_modes():
        return compute()


@contextmanager
def launches_recorded() -> Iterator[None]:
    """Record launches of Triton's kernels, in the interpreter, as calls with their grids."""
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    executor: Any = interpreter.GridExecutor
    run = executor.__call__

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        arguments = self.grid, *args, *sorted(options.items())
        return recorded_call(self.fn.__name__, arguments, lambda: run(self, *args, **options))

    executor.__call__ = launch
    try:
        yield
    finally:
        executor.__call__ = run


class RecordedStep:
    """A function that is run again at each replay, and compared with its first run."""

    def __init__(self, run: Callable[[], Outputs]) -> None:
        self._run = run
        with launches_recorded(), CallRecorder() as recorder:
            run()
        self.calls = recorder.calls

    def replay(self) -> Outputs:
        with launches_recorded(), CallRecorder(self.calls) as recorder:
            outputs = self._run()
        assert len(recorder.calls) == len(self.calls), "calls are missing"
        return outputs


class RecordedGraphs:
    """A `GraphDevice` on the CPU."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self.num_drops = 0

    def capture(self, run: Callable[[], Outputs]) -> CapturedStep:
        step = RecordedStep(run)
        self.steps.append(step)
        return step

    def drop(self) -> None:
        self.num_drops += 1


class LateStream:
    """A `CopyStream` that has copied only when an event behind the copy has passed.

    A host buffer that was changed before that raises AssertionError.
    """

    def __init__(self) -> None:
        self.num_copied = self.num_waits = 0
        self._running: list[tuple[int, Tensor, Tensor]] = []  # number, buffer, its content

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._check()
        target.copy_(source)
        self._running.append((self.num_copied, source, source.clone()))
        self.num_copied += 1

    def record(self) -> int:
        self._check()
        return self.num_copied

    def wait(self, event: int) -> None:
        self.num_waits += 1
        self._check()
        self._running = [copy for copy in self._running if copy[0] >= event]

    def _check(self) -> None:
        for number, source, content in self._running:
            assert torch.equal(source, content), (
                f"the buffer of copy {number} was changed too early"
            )
