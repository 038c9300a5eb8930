"""Stand-ins for a device's graphs and copies, which fail where a real device would compute nonsense."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ramify.engine.execution.step_graphs import CapturedStep, Outputs

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
        assert "lift_fresh" not in name, "a captured step copies a Python value to the device"
        call = name, tuple(map(self._describe, (*args, *sorted((kwargs or {}).items()))))
        index = len(self.calls)
        self.calls.append(call)
        if self._expected is not None:
            assert index < len(self._expected), f"call {index} is new: {call}"
            wanted = self._expected[index]
            assert call == wanted, f"call {index} differs: {call}, captured was {wanted}"
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, list | tuple) else [result]
        for at, output in enumerate(outputs):
            if isinstance(output, Tensor) and id(output) not in self._made:
                self._made[id(output)] = index, at
                self._alive.append(output)
        return result

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


class RecordedStep:
    """A function that is run again at each replay, and compared with its first run."""

    def __init__(self, run: Callable[[], Outputs]) -> None:
        self._run = run
        with CallRecorder() as recorder:
            run()
        self.calls = recorder.calls

    def replay(self) -> Outputs:
        with CallRecorder(self.calls) as recorder:
            outputs = self._run()
        assert len(recorder.calls) == len(self.calls), "calls are missing"
        return outputs


class RerunStep:
    """A function that is run again at each replay, and not compared.

    For kernels in Triton's interpreter, which reads tensors in ways of its own.
    """

    def __init__(self, run: Callable[[], Outputs]) -> None:
        self.replay = run


class RerunGraphs:
    """A `GraphDevice` on the CPU."""

    def capture(self, run: Callable[[], Outputs]) -> CapturedStep:
        return RerunStep(run)

    def drop(self) -> None:
        pass


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
