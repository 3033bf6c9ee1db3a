"""Replicas of the server on Ray Serve, with a router that knows what each of them can resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import serve

STATS_SECONDS = 0.5
"""How often a replica says what it can resume."""

DEFAULT_SLOTS = 4
MOST_WAITING = 16
"""Times as many requests as there are slots may run or wait at a replica; others wait before it."""


def app(
    model: str,
    replicas: int = 1,
    *,
    n_parallel: int = DEFAULT_SLOTS,
    server: Mapping[str, Any] | None = None,
    router: Any = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    **more: Any,
) -> serve.Application:
    """A Serve application: `serve.run(llamahybrid.ray.app("model.gguf", replicas=2))`.

    Each replica is the server of `llamahybrid serve` with `n_parallel` slots; `more` are its model settings
    (`n_ctx`, `disk_dir`, `remote`, ...), `server` its server settings. With `remote`, a Redis server that all
    share, a conversation whose replica is gone goes on elsewhere. `router`: another class of request router.
    `ray_actor_options`: what a replica needs, as Serve takes it (`{"num_cpus": 8}`, `{"num_gpus": 1}`).

    A request is sent where the deepest part of it can be resumed, if it does not have to queue there; a
    header x-session-id, or `prompt_cache_key` in the body, is honoured first. See `llamahybrid.ray.choice`.

    Raises:
        ImportError: Ray Serve is not installed (`pip install 'llamahybrid[ray]'`).
        pydantic.ValidationError: settings that mean nothing.
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
        request_router_class=router or ResumableRouter,
        request_router_kwargs={} if router else {"slots": n_parallel},
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
