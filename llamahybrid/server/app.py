"""The app: its routes, middleware and service."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from llamahybrid.server import cache_doors, cache_page, embeddings, errors, routes, tokens
from llamahybrid.server.limits import RequestLimits
from llamahybrid.server.llama_server import props
from llamahybrid.server.service import Service
from llamahybrid.server.settings import ModelSettings, ServerSettings, Settings, from_file


def create_app(
    settings: Settings | None = None,
    server_settings: ServerSettings | None = None,
    model_settings: Sequence[ModelSettings] | None = None,
) -> FastAPI:
    """Make an app as `llama_cpp.server.app.create_app`, by settings or by the environment.

    A config file named by `CONFIG_FILE` in the environment has priority. Models open when the app starts.
    Raises ValueError for contradictory settings, OSError for unreadable files.
    """
    if (config := os.environ.get("CONFIG_FILE")) is not None:
        server_settings, model_settings = from_file(Path(config))
    if server_settings is None or model_settings is None:
        settings = Settings() if settings is None else settings
        server_settings = ServerSettings.model_validate(
            settings.model_dump(include=set(ServerSettings.model_fields))
        )
        model_settings = [
            ModelSettings.model_validate(settings.model_dump(include=set(ModelSettings.model_fields)))
        ]
    return app_of(Service(server_settings, model_settings))


def app_of(service: Service) -> FastAPI:
    """Return the app of a service, which starts and stops with the app."""
    settings = service.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
            yield
        finally:
            await service.stop()

    app = FastAPI(title="llamahybrid", version=_version(), root_path=settings.root_path, lifespan=lifespan)
    app.state.service = service
    errors.install(app)
    for each in (routes, tokens, embeddings, props, cache_page, cache_doors):
        app.include_router(each.router)
    app.add_middleware(
        RequestLimits,
        settings=settings,
        require_room=service.admission.require_room,
        refused=service.metrics.refused,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _version() -> str:
    try:
        return version("llamahybrid")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0"
