"""Handlers of OpenAI's `/v1/files`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from starlette.responses import Response

from ramify.server.batches.batches import Batches, batches_of, file_response, page_of
from ramify.server.batches.directory import RECORD_BYTES, disk_error
from ramify.server.batches.protocol import MAX_EXPIRY_S, MIN_EXPIRY_S
from ramify.server.batches.records import FILE_S, StoredFile
from ramify.server.batches.store import new_id
from ramify.server.batches.upload import FileSink, Form, read_upload
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import whole_number

MAX_PAGE = 10_000
MAX_NAME_CHARS = 256
JSONL = "application/jsonl"


async def create_file(context: RequestContext) -> Response:
    """POST /v1/files: an upload with the purpose `batch`."""
    batches, tenant = batches_of(context), context.caller.tenant
    store = batches.store
    store.check_room_for_file(tenant)
    name = new_id("file-")
    try:
        handle = await asyncio.to_thread(store.directory.create, tenant, name)
    except OSError as error:
        raise disk_error(error) from None
    sink, is_added = FileSink(handle, store.space, tenant), False
    try:
        try:
            form = await read_upload(context.request, sink)
        finally:
            os.close(handle)
        lifetime_s = _lifetime_s(form)
        store.space.reserve(tenant, RECORD_BYTES)
        sink.num_bytes += RECORD_BYTES
        now = store.now
        record = StoredFile(
            id=name,
            tenant=tenant,
            filename=(form.filename or "")[:MAX_NAME_CHARS],
            purpose="batch",
            num_bytes=sink.num_bytes - RECORD_BYTES,
            created_at=now,
            expires_at=now + lifetime_s,
        )
        try:
            await store.add_file(record)
        except OSError as error:
            raise disk_error(error) from None
        is_added = True
        return context.json(_as_json(record))
    finally:
        if not is_added:
            store.space.count(tenant, -sink.num_bytes)
            await asyncio.to_thread(store.directory.remove, tenant, name)


def _lifetime_s(form: Form) -> int:
    """Seconds after which an upload is removed.

    Raises:
        ApiError: 400, the purpose is not `batch`, or the expiry is malformed.
    """
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        what = "is missing" if purpose is None else f"{purpose[:40]!r} is not served"
        raise ApiError(400, f"the purpose {what}; files are for batches: batch", param="purpose")
    anchor = form.fields.get("expires_after[anchor]")
    text = form.fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return FILE_S
    if anchor != "created_at":
        raise ApiError(400, "the anchor is created_at", param="expires_after[anchor]")
    seconds = whole_number(text or "")
    if seconds is None or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise ApiError(
            400,
            f"{(text or '')[:20]!r} is not a number from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}",
            param="expires_after[seconds]",
        )
    return seconds


async def list_files(context: RequestContext) -> Response:
    """GET /v1/files: the caller's files, a page of them."""
    store, query = batches_of(context).store, context.request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"{order[:20]!r} is neither asc nor desc", param="order")
    files = store.files(context.caller.tenant)
    if "purpose" in query:
        files = [file for file in files if file.purpose == query["purpose"]]
    page, has_more = page_of(
        files, query, default=MAX_PAGE, most=MAX_PAGE, is_newest_first=order == "desc"
    )
    return context.json(list_json([_as_json(file) for file in page], has_more))


def list_json(page: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list, in OpenAI's form."""
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


async def get_file(context: RequestContext) -> Response:
    """GET /v1/files/{name}."""
    return context.json(_as_json(_named(context, batches_of(context))))


async def file_content(context: RequestContext) -> Response:
    """GET /v1/files/{name}/content: the file's bytes."""
    batches = batches_of(context)
    record = _named(context, batches)
    path = batches.store.directory.file(record.tenant, record.id)
    try:
        return file_response(path, JSONL, context.headers)
    except FileNotFoundError:
        raise _unknown(record.id) from None


async def delete_file(context: RequestContext) -> Response:
    """DELETE /v1/files/{name}; 409 while an unfinished batch uses it."""
    batches = batches_of(context)
    record = _named(context, batches)
    user = batches.store.user_of(record)
    if user is not None:
        raise ApiError(
            409,
            f"the batch {user.id} uses this file; cancel it, or wait for its end",
            code="file_in_use",
        )
    await batches.store.remove_file(record)
    return context.json({"id": record.id, "object": "file", "deleted": True})


def _named(context: RequestContext, batches: Batches) -> StoredFile:
    """The file that the path names.

    Raises:
        ApiError: 404, the caller has no such file.
    """
    return file_of(context, batches, context.request.path_params["name"], "file_id")


def file_of(context: RequestContext, batches: Batches, name: str, param: str) -> StoredFile:
    """A file of the caller.

    Raises:
        ApiError: 404, there is none.
    """
    record = batches.store.find_file(context.caller.tenant, name)
    if record is None:
        raise _unknown(name, param)
    return record


def _unknown(name: str, param: str = "file_id") -> ApiError:
    return ApiError(404, f"there is no file {name[:100]!r}", param=param)


def _as_json(record: StoredFile) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }
