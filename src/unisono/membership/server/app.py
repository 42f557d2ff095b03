"""The routes of the coordinator's HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError

from unisono.membership.messages import (
    DecisionMessage,
    ExitMessage,
    RunningMessage,
    RunningReply,
    StatusMessage,
    WorkerMessage,
    seconds_by_phase,
)
from unisono.membership.server.run_spec_routes import add_run_spec_routes
from unisono.membership.server.service import HeartbeatRoute, Service
from unisono.membership.server.token_auth import App, Receive, Scope, Send, TokenAuth

HEARTBEAT_PATH = "/v1/beat"


def application(service: Service, token: str) -> TokenAuth:
    """The coordinator's ASGI application; every request must prove that its sender knows `token`."""

    @asynccontextmanager
    async def ticking(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(service.tick())
        yield
        task.cancel()

    app = FastAPI(title="Unisono coordinator", version="1", lifespan=ticking, docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)

    @app.post("/v1/gone", status_code=204)
    async def exited(message: ExitMessage) -> None:
        """For a launcher: report that a worker's process has exited."""
        service.decide(service.coordinator.worker_exited(message.worker, service.now()))
        service.report_stalls()

    @app.post("/v1/running")
    async def running(message: RunningMessage, request: Request) -> RunningReply:
        """For a launcher: report workers whose processes are running or runnable. The response comes when the launcher
        should check again, or after a while."""
        for worker in message.workers:
            service.coordinator.worker_running(worker, service.now())
        late = await service.wait_for_late_member(request.receive)
        return RunningReply(late=late, steps=service.coordinator.step_count)

    @app.get("/v1/status", response_model=StatusMessage)
    async def status() -> Response:
        """All workers, and the latest decisions."""
        # Without FastAPI's validation of the response: with thousands of workers, heartbeats would wait for it.
        return Response(_status(service).json_text(), media_type="application/json")

    add_run_spec_routes(app, service.store)
    return TokenAuth(_route(HeartbeatRoute(service), app), token)


async def _refuse(_: Request, error: Exception) -> Response:
    """The response to a message that does not fit its definition: what is wrong, without the message itself, which may
    contain anything."""
    assert isinstance(error, RequestValidationError)
    problems = [{name: each[name] for name in ("type", "loc", "msg")} for each in error.errors()]
    return Response(json.dumps({"detail": problems}), 422, media_type="application/json")


def _route(heartbeats: App, app: App) -> App:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        is_heartbeat = scope["type"] == "http" and scope["path"] == HEARTBEAT_PATH and scope["method"] == "POST"
        await (heartbeats if is_heartbeat else app)(scope, receive, send)

    return route


def _status(service: Service) -> StatusMessage:
    now, reports = service.now(), service.reports
    spent = {worker: seconds_by_phase(seconds) for worker, seconds in reports.spent.items()}
    activities = {worker: activity for worker, (activity, _) in reports.activities.items()}
    workers = [
        WorkerMessage(
            worker=heartbeat.worker,
            active_view=heartbeat.active_view,
            step=heartbeat.version.step,
            age_seconds=round(now - last, 3),
            leaving=heartbeat.leaving,
            activity=activities.get(heartbeat.worker),
            spent=spent.get(heartbeat.worker, {}),
        )
        for heartbeat, last in service.coordinator.last_heartbeats()
    ]
    return StatusMessage(
        view=service.update.view,
        status=service.update.status,
        workers=workers,
        decisions=[DecisionMessage(at_seconds=at, text=text) for at, text in service.store.decisions()],
        findings=reports.findings,
        spent=spent,
    )
