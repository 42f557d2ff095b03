"""What the workers of a run are to do, kept at its coordinator for those who join later."""

from __future__ import annotations

from fastapi import FastAPI, Response

from unisono.membership.messages import OrderMessage, TraitsMessage
from unisono.membership.server.store import Store


def offer(app: FastAPI, store: Store) -> None:
    """Have `app` take one order and one set of traits, and give them to whoever asks."""

    @app.get("/v1/order", responses={404: {"description": "there is none"}}, response_model=OrderMessage)
    async def order() -> Response:
        """What workers of this run are to do."""
        told = store.order()
        return Response(told, 200 if told else 404, media_type="application/json")

    @app.put("/v1/order", status_code=204, responses={409: {"description": "there is another one"}})
    async def give(message: OrderMessage) -> Response:
        """What they are to do; said once, since a coordinator is one run's."""
        try:
            told = message.model_dump_json()
        except ValueError:  # nested deeper than can be written
            return Response(status_code=422)
        return Response(status_code=204 if store.keep_order(told) else 409)

    @app.get("/v1/traits", responses={404: {"description": "there are none"}}, response_model=TraitsMessage)
    async def traits() -> Response:
        """What a worker must have in common with those of this run."""
        told = store.traits()
        return Response(told, 200 if told else 404, media_type="application/json")

    @app.put("/v1/traits", response_model=TraitsMessage)
    async def keep(message: TraitsMessage) -> Response:
        """The same, from a worker of the run's own launcher; answered with what the first of them told."""
        return Response(store.keep_traits(message.model_dump_json()), media_type="application/json")
