"""Ray and Serve as far as `ray_serve` uses them: notes the calls, and starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class RayError(Exception):
    """That of `ray.exceptions`."""


class ServeError(Exception):
    """`RayServeException` of `ray.serve.exceptions`."""


@dataclass
class Deployment:
    """What `serve.deployment` makes of a class."""

    made_of: type
    options_given: dict[str, Any]
    arguments: tuple[Any, ...] = ()

    def options(self, **options: Any) -> Deployment:
        return Deployment(self.made_of, self.options_given | options)

    def bind(self, *arguments: Any) -> Deployment:
        return Deployment(self.made_of, self.options_given, arguments)


@dataclass
class FakeRay:
    """A cluster. `calls` are the names of what was called, in order.

    Args:
        num_looks: at the status of a deployment until it has ended; it is deleted first.
        failure: raised by `serve.run`.
    """

    num_looks: int = 2
    failure: Exception | None = None
    calls: list[str] = field(default_factory=list)
    applications: dict[str, Any] = field(default_factory=dict)
    ending: dict[str, int] = field(default_factory=dict)

    def modules(self) -> dict[str, ModuleType]:
        """The modules by name, for `sys.modules`."""
        serve = self._module(
            "ray.serve",
            start=self._note("serve.start"),
            shutdown=self._note("serve.shutdown"),
            run=self._run,
            delete=self._delete,
            status=self._status,
            deployment=lambda **options: lambda made_of: Deployment(made_of, options),
            ingress=lambda: lambda made_of: made_of,
        )
        context = SimpleNamespace(gcs_address="10.0.0.1:6379")
        ray = self._module(
            "ray",
            init=self._note("ray.init"),
            shutdown=self._note("ray.shutdown"),
            get_runtime_context=lambda: context,
            serve=serve,
        )
        policies = dict.fromkeys(("AutoscalingConfig", "AutoscalingPolicy"), SimpleNamespace)
        return {
            "ray": ray,
            "ray.serve": serve,
            "ray.exceptions": self._module("ray.exceptions", RayError=RayError),
            "ray.serve.config": self._module("ray.serve.config", **policies),
            "ray.serve.exceptions": self._module(
                "ray.serve.exceptions", RayServeException=ServeError
            ),
        }

    @staticmethod
    def _module(name: str, **names: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(names)
        return module

    def _note(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)

        return call

    def _run(self, application: Deployment, *, name: str, route_prefix: str | None) -> None:
        del route_prefix
        self.calls.append("serve.run")
        if self.failure is not None:
            raise self.failure
        self.applications[name] = application

    def _delete(self, name: str, *, _blocking: bool) -> None:
        assert not _blocking, "Serve gives up after 60 s"
        self.calls.append("serve.delete")
        self.ending[name] = self.num_looks

    def _status(self) -> Any:
        for name in [*self.ending]:
            self.ending[name] -= 1
            if self.ending[name] < 0:
                del self.ending[name], self.applications[name]
        deployments = {"engine": SimpleNamespace(message="a line\nthe model is nowhere")}
        shown = dict.fromkeys(self.applications, SimpleNamespace(deployments=deployments))
        if self.failure is not None:
            shown["ramify"] = SimpleNamespace(deployments=deployments)
        return SimpleNamespace(applications=shown)
