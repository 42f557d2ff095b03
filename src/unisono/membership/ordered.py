"""What the workers of a run are to do, kept at its coordinator for those who join later."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field

from unisono.membership.store import Store

Text = Annotated[str, Field(max_length=4096)]


class HolderMessage(BaseModel):
    """The command that holds the lock on the run's directory: its host, its process there, and since when, in seconds
    since 1970."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    host: Annotated[str, Field(max_length=256)]
    process: Annotated[int, Field(ge=0, lt=1 << 62)]
    since: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OrderMessage(BaseModel):
    """A run, as any host can be told of it.

    Args:
        task: by a name that means the same in every directory; empty for one that cannot be told.
        arguments: of the task.
        script: in place of a task, the path of a script with a loop of its own, and the words that follow it.
        settings: Config fields.
        run: the run's directory, where it is the same on all hosts.
        meets_at: see `Contact`, of who gave the order.
        began: seconds since 1970 when the command was given.
        holder: of the lock on the run's directory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    task: Text
    arguments: dict[str, Any] = {}
    script: list[Text] = []
    settings: dict[str, Any] = {}
    run: Text = ""
    meets_at: Text = ""
    began: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    holder: HolderMessage | None = None


class TraitsMessage(BaseModel):
    """What all workers of the run must have in common, see `unisono.traits`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    traits: Annotated[dict[Annotated[str, Field(max_length=256)], Text], Field(max_length=256)]


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
        return Response(status_code=204 if store.keep_order(message.model_dump_json()) else 409)

    @app.get("/v1/traits", responses={404: {"description": "there are none"}}, response_model=TraitsMessage)
    async def traits() -> Response:
        """What a worker must have in common with those of this run."""
        told = store.traits()
        return Response(told, 200 if told else 404, media_type="application/json")

    @app.put("/v1/traits", response_model=TraitsMessage)
    async def keep(message: TraitsMessage) -> Response:
        """The same, from a worker of the run's own launcher; answered with what the first of them told."""
        return Response(store.keep_traits(message.model_dump_json()), media_type="application/json")
