"""Handlers of OpenAI's `/v1/batches`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from ramify.server.batches.batches import Batches, batches_of, page_of
from ramify.server.batches.directory import disk_error
from ramify.server.batches.file_endpoints import file_of, list_json
from ramify.server.batches.protocol import BatchRequest
from ramify.server.batches.records import FILE_S, WINDOW_S, BatchRecord
from ramify.server.batches.store import new_id
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.request_fields.unsupported_fields import UnsupportedFields

FIELDS = UnsupportedFields()
DEFAULT_PAGE, MAX_PAGE = 20, 100
# Times of a batch's states, as the batch shows them.
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


async def create_batch(context: RequestContext) -> Response:
    """POST /v1/batches: begins to run at once, at low priority."""
    batches = batches_of(context)
    request = await context.body(BatchRequest, FIELDS)
    tenant = context.caller.tenant
    file = file_of(context, batches, request.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise ApiError(
            400, f"the purpose of {file.id} is {file.purpose}, not batch", param="input_file_id"
        )
    now = batches.store.now
    expiry = request.output_expires_after
    batch = BatchRecord(
        id=new_id("batch_"),
        tenant=tenant,
        api="openai",
        input_id=file.id,
        endpoint=request.endpoint,
        output_id=new_id("file-"),
        error_id=new_id("file-"),
        created_at=now,
        expires_at=now + WINDOW_S,
        output_s=FILE_S if expiry is None else expiry.seconds,
        metadata=request.metadata,
    )
    await begin(batches, batch)
    return context.json(_as_json(batch))


async def begin(batches: Batches, batch: BatchRecord) -> None:
    """Store a batch and run it.

    Raises:
        ApiError: 413, 429 or 503, there is no room.
    """
    try:
        await batches.store.add_batch(batch)
    except OSError as error:
        raise disk_error(error) from None
    batches.runner.submit(batch)


async def list_batches(context: RequestContext) -> Response:
    """GET /v1/batches: the caller's, the newest first."""
    batches = batches_of(context)
    own = own_batches(context, batches, "openai")
    page, has_more = page_of(own, context.request.query_params, default=DEFAULT_PAGE, most=MAX_PAGE)
    shown = [_as_json(batches.runner.current(batch)) for batch in page]
    return context.json(list_json(shown, has_more))


def own_batches(context: RequestContext, batches: Batches, api: str) -> list[BatchRecord]:
    """The batches of the caller that were made by an API, oldest first."""
    return [batch for batch in batches.store.batches(context.caller.tenant) if batch.api == api]


async def get_batch(context: RequestContext) -> Response:
    """GET /v1/batches/{name}."""
    batches = batches_of(context)
    return context.json(_as_json(batches.runner.current(named(context, batches, "openai"))))


async def cancel_batch(context: RequestContext) -> Response:
    """POST /v1/batches/{name}/cancel; answers that are there by then stay."""
    batches = batches_of(context)
    batch = named(context, batches, "openai")
    if not batch.is_unfinished:
        raise ApiError(
            409, f"the batch {batch.id} is {batch.status}; it cannot be cancelled any more"
        )
    return context.json(_as_json(await cancelled(batches, batch)))


async def cancelled(batches: Batches, batch: BatchRecord) -> BatchRecord:
    """Cancel a batch; returns its state.

    Raises:
        ApiError: 503, the disk is full; the batch goes on.
    """
    try:
        return await batches.runner.cancel(batch)
    except OSError as error:
        raise disk_error(error) from None


def named(context: RequestContext, batches: Batches, api: str) -> BatchRecord:
    """The batch that the path names.

    Raises:
        ApiError: 404, the caller has no such batch.
    """
    name = context.request.path_params["name"]
    batch = batches.store.find_batch(context.caller.tenant, name)
    if batch is None or batch.api != api:
        raise ApiError(404, f"there is no batch {name[:100]!r}", param="batch_id")
    return batch


def _as_json(batch: BatchRecord) -> dict[str, Any]:
    counts = batch.counts
    errors = [
        {"code": error.code, "line": error.line, "message": error.message, "param": error.param}
        for error in batch.errors
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_id if batch.has_output else None,
        "error_file_id": batch.error_id if batch.has_errors else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{state}_at": batch.times.get(state) for state in _TIMES},
        "request_counts": {
            "total": counts.total,
            "completed": counts.succeeded,
            "failed": counts.errored,
        },
        "metadata": batch.metadata,
    }
