"""Replicas of the server on Ray Serve, with a router that knows the prefixes each replica can resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import serve

STATS_SECONDS = 0.5
"""Interval at which a replica reports its resumable prefixes."""

DEFAULT_SLOTS = 4
MOST_WAITING = 16
"""Requests per slot that may run or wait at a replica; further ones wait at the router."""


def app(
    model: str,
    replicas: int = 1,
    *,
    n_parallel: int = DEFAULT_SLOTS,
    server: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    **more: Any,
) -> serve.Application:
    """A Serve application: `serve.run(llamahybrid.ray.app("model.gguf", replicas=2))`.

    Each replica is the server of `llamahybrid serve` with `n_parallel` slots; `more` are its model settings
    (`n_ctx`, `disk_dir`, `remote`, ...), `server` its server settings. With `remote`, a shared Redis server,
    other replicas continue the conversations of a lost one. `ray_actor_options`: resources of a replica, for
    Serve (`{"num_cpus": 8}`, `{"num_gpus": 1}`).

    A request goes to the replica that can resume most of it, unless it would queue there; a header
    x-session-id, or `prompt_cache_key` in the body, comes first. See `llamahybrid.ray.choice`.

    Raises:
        ImportError: Ray Serve is not installed (`pip install 'llamahybrid[ray]'`).
        pydantic.ValidationError: invalid settings.
    """
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as error:
        raise ImportError("replicas need Ray Serve: pip install 'llamahybrid[ray]'") from error

    from llamahybrid.ray.replica import Front, Replica
    from llamahybrid.ray.router import ResumableRouter
    from llamahybrid.server.settings import ModelSettings, ServerSettings

    settings = ServerSettings(**(server or {}))
    model_settings = {"model": model, "n_parallel": n_parallel, **more}
    ModelSettings(**model_settings)
    routing = RequestRouterConfig(
        request_router_class=ResumableRouter,
        request_router_kwargs={"slots": n_parallel},
        request_routing_stats_period_s=STATS_SECONDS,
    )
    deployed = serve.deployment(
        Replica,
        name="llamahybrid",
        num_replicas=replicas,
        max_ongoing_requests=MOST_WAITING * n_parallel,
        request_router_config=routing,
        ray_actor_options=dict(ray_actor_options or {}),
    )
    gate = serve.deployment(Front, name="llamahybrid-front", max_ongoing_requests=10_000)
    return gate.bind(deployed.bind(dict(server or {}), model_settings), settings.max_body_bytes)
