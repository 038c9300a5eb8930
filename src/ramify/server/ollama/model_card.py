"""What is said of the model that is served: /api/tags, /api/show, /api/ps.

One model has all names of the server, with one digest. It is loaded as long as the server runs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ramify.models.configs.pooling import PoolingConfig
from ramify.server.http.wire import encode_json
from ramify.server.ollama.checkpoint_facts import CheckpointFacts, read_facts
from ramify.server.ollama.names import tagged
from ramify.server.ollama.options import OLLAMA_DEFAULTS, supports_thinking
from ramify.server.ollama.response import timestamp
from ramify.server.service import RequestService

NEVER = "9999-12-31T23:59:59Z"  # when the model will be unloaded
LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model of a server, as Ollama's clients read it."""

    service: RequestService
    facts: CheckpointFacts

    @classmethod
    def of(cls, service: RequestService) -> ModelCard:
        """Read what the checkpoint's files say, if they are on this machine."""
        path = service.engine.description.path
        return cls(service, read_facts(Path(path)) if path else CheckpointFacts())

    @property
    def capabilities(self) -> list[str]:
        """What the model can do."""
        service = self.service
        return [
            "completion",
            *(("tools",) if service.prompt_renderer.conventions.writes_tools else ()),
            *(("thinking",) if supports_thinking(service) else ()),
            *(("embedding",) if service.pooling != PoolingConfig() else ()),
        ]

    @property
    def details(self) -> dict[str, Any]:
        """`details` of an entry."""
        facts, engine = self.facts, self.service.engine
        quantize = engine.config.requested.model.quantize
        level = facts.weight_type or LEVELS.get(engine.description.dtype, "unknown")
        if quantize not in ("off", "widen"):
            level = quantize.upper()
        return {
            "parent_model": "",
            "format": facts.form,
            "family": facts.architecture,
            "families": [facts.architecture],
            "parameter_size": _parameter_text(facts.num_parameters),
            "quantization_level": level,
        }

    @property
    def digest(self) -> str:
        """SHA-256 of what can differ between models: clients remember capabilities by it."""
        service = self.service
        parts = (service.model, service.tokenizer.digest, service.max_model_len, self.capabilities)
        return hashlib.sha256(encode_json((*parts, self.details, self.facts.num_bytes))).hexdigest()

    @property
    def started(self) -> str:
        """When the server started."""
        return timestamp(datetime.fromtimestamp(self.service.started_s, UTC))

    def _entries(self, **fields: Any) -> list[dict[str, Any]]:
        """An entry for each name of the model."""
        size, digest, details = self.facts.num_bytes, self.digest, self.details
        entries = []
        for name in map(tagged, self.service.names):
            entry = {"name": name, "model": name, "size": size, "digest": digest}
            entries.append(entry | {"details": details} | fields)
        return entries

    def listed(self) -> list[dict[str, Any]]:
        """`models` of /api/tags."""
        return self._entries(modified_at=self.started, capabilities=self.capabilities)

    def running(self) -> list[dict[str, Any]]:
        """`models` of /api/ps."""
        is_gpu = self.service.engine.config.requested.model.device.startswith("cuda")
        return self._entries(
            expires_at=NEVER,
            size_vram=self.facts.num_bytes if is_gpu else 0,
            context_length=self.service.max_request_len,
        )

    def shown(self, name: str) -> dict[str, Any]:
        """The answer of /api/show."""
        service, facts = self.service, self.facts
        arch, size = facts.architecture, service.engine.description.hidden_size
        info: dict[str, Any] = {
            "general.architecture": arch,
            "general.basename": service.model,
            f"{arch}.context_length": service.max_request_len,
        }
        if facts.num_parameters:
            info["general.parameter_count"] = facts.num_parameters
        if size is not None:
            info[f"{arch}.embedding_length"] = size
        info |= {f"{arch}.{key}": value for key, value in facts.dimensions}
        defaults = service.sampling_defaults
        values = {
            key: OLLAMA_DEFAULTS.get(key, value) if key not in defaults.named else value
            for key, value in defaults.values().items()
        }
        parameters = "\n".join(
            f"{'repeat_penalty' if key == 'repetition_penalty' else key} {value}"
            for key, value in values.items()
            if value is not None
        )
        return {
            "modelfile": f"# served by Ramify\nFROM {tagged(name)}\n",
            "parameters": parameters,
            "template": service.tokenizer.chat_template or "",
            "details": self.details,
            "model_info": info,
            "capabilities": self.capabilities,
            "modified_at": self.started,
        }


def _parameter_text(number: int) -> str:
    """A number of parameters as people say it: `134.5M`, `1.1B`; empty if it is not known."""
    if not number:
        return ""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
