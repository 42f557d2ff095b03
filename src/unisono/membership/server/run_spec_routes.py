"""Routes for the run that a coordinator serves, which launchers on other hosts read when they join."""

from __future__ import annotations

from fastapi import FastAPI, Response

from unisono.membership.messages import RunSpecMessage, TraitsMessage
from unisono.membership.server.store import Store


def add_run_spec_routes(app: FastAPI, store: Store) -> None:
    """Add the routes to `app`; `store` takes one run and one set of traits."""

    @app.get("/v1/order", responses={404: {"description": "there is none"}}, response_model=RunSpecMessage)
    async def run_spec() -> Response:
        """The run that this coordinator serves."""
        text = store.run_spec()
        return Response(text, 200 if text else 404, media_type="application/json")

    @app.put("/v1/order", status_code=204, responses={409: {"description": "there is another one"}})
    async def put_run_spec(message: RunSpecMessage) -> Response:
        """Set the run that this coordinator serves; only once, since a coordinator serves one run."""
        try:
            text = message.json_text()
        except ValueError:  # the message is nested deeper than can be encoded
            return Response(status_code=422)
        return Response(status_code=204 if store.put_run_spec(text) else 409)

    @app.get("/v1/traits", responses={404: {"description": "there are none"}}, response_model=TraitsMessage)
    async def traits() -> Response:
        """What must be equal on all workers of this run."""
        text = store.traits()
        return Response(text, 200 if text else 404, media_type="application/json")

    @app.put("/v1/traits", response_model=TraitsMessage)
    async def put_traits(message: TraitsMessage) -> Response:
        """For a worker of the run's own launcher: send its traits; the response has those of the first such worker."""
        return Response(store.put_traits(message.json_text()), media_type="application/json")
