"""Handlers of Anthropic's `/v1/messages/batches`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from ramify.server.batches.batches import Batches, batches_of, file_response, index_of
from ramify.server.batches.directory import BatchDirectory, disk_error, write_all
from ramify.server.batches.endpoints import begin, cancelled, named, own_batches
from ramify.server.batches.plan import MAX_LINES
from ramify.server.batches.protocol import MessageBatchItem, MessageBatchRequest
from ramify.server.batches.records import WINDOW_S, BatchRecord, LineCounts
from ramify.server.batches.store import new_id
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.body_errors import not_json, validation_error
from ramify.server.http.request_body import without_mark
from ramify.server.http.wire import whole_number

ENDPOINT = "/v1/messages"
DEFAULT_PAGE, MAX_PAGE = 20, 1000
JSONL = "application/x-jsonl"
NOT_COMPRESSED = -1  # of `msgspec.json.format`: no white space


async def create_batch(context: RequestContext) -> Response:
    """POST /v1/messages/batches: begins to run at once, at low priority."""
    batches, tenant = batches_of(context), context.caller.tenant
    body = await context.read()
    lines, num_lines = await context.in_prompt_thread(_lines, body)
    store, name = batches.store, new_id("msgbatch_")
    input_id = f"{name}-input"
    store.space.reserve(tenant, len(lines))
    is_begun = False
    try:
        await asyncio.to_thread(_write, store.directory, tenant, input_id, lines)
        now = store.now
        batch = BatchRecord(
            id=name,
            tenant=tenant,
            api="anthropic",
            input_id=input_id,
            endpoint=ENDPOINT,
            output_id=f"{name}-results",
            error_id=f"{name}-errors",
            created_at=now,
            expires_at=now + WINDOW_S,
            counts=LineCounts(total=num_lines),
        )
        await begin(batches, batch)
        is_begun = True
        return context.json(_as_json(context, batch))
    finally:
        if not is_begun:
            store.space.count(tenant, -len(lines))
            await asyncio.to_thread(store.directory.remove, tenant, input_id)


def _write(directory: BatchDirectory, tenant: str, name: str, lines: bytes) -> None:
    """Store the requests of a batch.

    Raises:
        ApiError: 503, the disk is full.
    """
    try:
        handle = directory.create(tenant, name)
        try:
            write_all(handle, lines)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise disk_error(error) from None


def _lines(body: bytes | bytearray) -> tuple[bytes, int]:
    """The requests of a body, a line for each; and how many they are.

    Raises:
        ApiError: 400, they are malformed, none or too many, or two have the same id.
    """
    try:
        items = msgspec.json.decode(without_mark(body), type=MessageBatchRequest).requests
    except msgspec.ValidationError as error:
        read = partial(msgspec.json.decode, without_mark(body))
        raise validation_error(error, MessageBatchRequest, read) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
    if not 0 < len(items) <= MAX_LINES:
        raise ApiError(
            400, f"the number of requests is {len(items)}; send 1 to {MAX_LINES}", param="requests"
        )
    ids: set[str] = set()
    lines = bytearray()
    for number, item in enumerate(items):
        where = f"requests[{number}]"
        try:
            request = msgspec.json.decode(item, type=MessageBatchItem)
            params = msgspec.json.format(request.params, indent=NOT_COMPRESSED)
        except msgspec.ValidationError as error:
            read = partial(msgspec.json.decode, item)
            raise validation_error(error, MessageBatchItem, read, where) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(error, "it", where) from None
        if not params.startswith(b"{"):
            raise ApiError(400, "it is not an object", param=f"{where}.params")
        if request.custom_id in ids:
            raise ApiError(
                400, f"{request.custom_id} is the id of another request", param=f"{where}.custom_id"
            )
        ids.add(request.custom_id)
        lines += b'{"custom_id":"%b","params":%b}\n' % (request.custom_id.encode(), params)
    return bytes(lines), len(items)


async def list_batches(context: RequestContext) -> Response:
    """GET /v1/messages/batches: the caller's, the newest first."""
    batches = batches_of(context)
    own = own_batches(context, batches, "anthropic")[::-1]
    page, has_more = _page(own, context.request.query_params)
    return context.json(
        {
            "data": [_as_json(context, batches.runner.current(batch)) for batch in page],
            "has_more": has_more,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }
    )


def _page(
    batches: Sequence[BatchRecord], query: Mapping[str, str]
) -> tuple[Sequence[BatchRecord], bool]:
    """A page of batches, as `limit`, `after_id` and `before_id` ask for it; and whether more follow.

    Raises:
        ApiError: 400, a parameter is malformed or names no batch.
    """
    text = query.get("limit", str(DEFAULT_PAGE))
    limit = whole_number(text, max_digits=6)
    if limit is None or not 1 <= limit <= MAX_PAGE:
        raise ApiError(400, f"{text[:20]!r} is not a number from 1 to {MAX_PAGE}", param="limit")
    if "before_id" in query:
        end = index_of(batches, query["before_id"], "before_id")
        return batches[max(0, end - limit) : end], end > limit
    start = 1 + index_of(batches, query["after_id"], "after_id") if "after_id" in query else 0
    return batches[start : start + limit], start + limit < len(batches)


async def get_batch(context: RequestContext) -> Response:
    """GET /v1/messages/batches/{name}."""
    batches, batch = _named(context)
    return context.json(_as_json(context, batches.runner.current(batch)))


async def cancel_batch(context: RequestContext) -> Response:
    """POST /v1/messages/batches/{name}/cancel; answers that are there by then stay."""
    batches, batch = _named(context)
    if not batch.is_unfinished:
        raise ApiError(400, f"the batch {batch.id} has ended; it cannot be canceled any more")
    return context.json(_as_json(context, await cancelled(batches, batch)))


async def delete_batch(context: RequestContext) -> Response:
    """DELETE /v1/messages/batches/{name}: a batch that has ended, with its results."""
    batches, batch = _named(context)
    if batch.is_unfinished:
        raise ApiError(400, f"the batch {batch.id} has not ended; cancel it first")
    await batches.store.remove_batch(batch)
    return context.json({"id": batch.id, "type": "message_batch_deleted"})


async def batch_results(context: RequestContext) -> Response:
    """GET /v1/messages/batches/{name}/results: a line for each request, in any order."""
    batches, batch = _named(context)
    if batch.is_unfinished:
        raise ApiError(400, f"the batch {batch.id} has not ended; its results are not there yet")
    path = batches.store.directory.file(batch.tenant, batch.output_id)
    try:
        return file_response(path, JSONL, context.headers)
    except FileNotFoundError:
        raise ApiError(404, f"the batch {batch.id} has no results") from None


def _named(context: RequestContext) -> tuple[Batches, BatchRecord]:
    """The batch that the path names.

    Raises:
        ApiError: 404, the caller has no such batch.
    """
    batches = batches_of(context)
    return batches, named(context, batches, "anthropic")


def _as_json(context: RequestContext, batch: BatchRecord) -> dict[str, Any]:
    counts, ended_at = batch.counts, batch.ended_at
    is_ended = not batch.is_unfinished
    state = "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if is_ended else state,
        # Of a batch that has not ended, all requests count as processing: so it is in Anthropic's API.
        "request_counts": {
            "processing": 0 if is_ended else counts.total,
            "succeeded": counts.succeeded if is_ended else 0,
            "errored": counts.errored if is_ended else 0,
            "canceled": counts.cancelled if is_ended else 0,
            "expired": counts.expired if is_ended else 0,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended_at),
        "cancel_initiated_at": _time(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": _results_url(context, batch) if is_ended else None,
    }


def _time(unix_s: int | None) -> str | None:
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat()


def _results_url(context: RequestContext, batch: BatchRecord) -> str:
    """Where the caller finds the results, by the scheme in which it has called a proxy."""
    request = context.request
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
    base = request.base_url.replace(scheme="https" if scheme == "https" else "http")
    return f"{str(base).rstrip('/')}/v1/messages/batches/{batch.id}/results"
