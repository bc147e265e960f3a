"""Holds the state that all routes share. `build_context` makes it once, and `close_context` closes it once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from milkglass.server.inference.model_cache import ModelCache
from milkglass.server.jobs.queue import Jobs
from milkglass.server.settings import HomeFolder, ServerSettings
from milkglass.server.storage.recording import Recording
from milkglass.server.storage.registry import BaseModels, ModelRegistry
from milkglass.server.storage.store import Store
from milkglass.server.storage.uploads import Uploads

T = TypeVar("T")
MAX_SLOW_REQUESTS = 8  # requests that read whole files or models at a time; others wait without a thread


@dataclass(frozen=True)
class Context:
    """Holds everything that the routes share."""

    settings: ServerSettings
    home: HomeFolder
    store: Store
    uploads: Uploads
    registry: ModelRegistry
    jobs: Jobs
    model_cache: ModelCache
    recording: Recording
    stopping: threading.Event  # set when the server is asked to stop: streams end by themselves
    _slow_limiter: CapacityLimiter = field(default_factory=partial(CapacityLimiter, MAX_SLOW_REQUESTS))

    async def run_slow(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work` in one of a few threads, so that quick requests always find a free one."""
        return await to_thread.run_sync(work, *arguments, limiter=self._slow_limiter)


def build_context(settings: ServerSettings, home: HomeFolder) -> Context:
    """Opens all that is in `home`, cleans up after a kill, and starts the job thread. The caller has locked `home`."""
    home.prepare()
    store = Store(home.root / "state.sqlite")
    uploads = Uploads(home, store, settings.max_upload, settings.upload_max_idle, settings.max_uploads)
    uploads.sweep()
    registry = ModelRegistry(home, store, uploads, BaseModels(settings.base_models, store))
    registry.sweep()
    model_cache = ModelCache(settings, registry.folder)
    registry.on_remove.append(model_cache.forget)
    jobs = Jobs(settings, home, store, registry, uploads)
    recording = Recording(settings.record, store)
    registry.on_publish.append(recording.record_model)
    jobs.on_start.append(recording.record_training)
    jobs.start()
    return Context(settings, home, store, uploads, registry, jobs, model_cache, recording, threading.Event())


def close_context(context: Context) -> None:
    """Stops the job thread, whose worker saves a checkpoint within its grace time, and closes the rest."""
    context.stopping.set()
    context.jobs.stop()
    context.model_cache.close()
    context.store.close()


def _context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


SharedContext = Annotated[Context, Depends(_context_of)]  # a route's parameter of this type gets the context
