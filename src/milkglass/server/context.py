"""What the routes share: one object, made once, closed once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request

from milkglass.server.bases import Bases
from milkglass.server.home import Home
from milkglass.server.jobs import Jobs
from milkglass.server.loading import Loader
from milkglass.server.recording import Recording
from milkglass.server.registry import Registry
from milkglass.server.settings import Settings
from milkglass.server.store import Store
from milkglass.server.uploads import Uploads

T = TypeVar("T")
SLOW = 8  # requests that read whole files or models at a time; the others of their kind wait without a thread


@dataclass(frozen=True)
class Context:
    settings: Settings
    home: Home
    store: Store
    uploads: Uploads
    registry: Registry
    jobs: Jobs
    loader: Loader
    recording: Recording
    stopping: threading.Event  # set when the server is asked to stop: streams end by themselves
    _slow: CapacityLimiter = field(default_factory=partial(CapacityLimiter, SLOW))

    async def slowly(self, work: Callable[..., T], *given: Any) -> T:
        """Run `work` in a thread, so that quick requests always find one."""
        return await to_thread.run_sync(work, *given, limiter=self._slow)


def build(settings: Settings, home: Home) -> Context:
    """Open the home, tidy what a kill left, start the job thread. The caller holds the home's lock."""
    home.prepare()
    store = Store(home.root / "state.sqlite")
    uploads = Uploads(home, store, settings.max_upload, settings.upload_patience, settings.max_uploads)
    uploads.sweep()
    registry = Registry(home, store, uploads, Bases(settings.base_models, store))
    registry.sweep()
    loader = Loader(settings, registry.folder)
    registry.on_remove.append(loader.forget)
    jobs = Jobs(settings, home, store, registry, uploads)
    recording = Recording(settings.record, store)
    registry.on_publish.append(recording.model)
    jobs.on_start.append(recording.trained)
    jobs.start()
    return Context(settings, home, store, uploads, registry, jobs, loader, recording, threading.Event())


def close(context: Context) -> None:
    """Let the worker checkpoint, then close the rest. May take the grace time."""
    context.stopping.set()
    context.jobs.stop()
    context.loader.close()
    context.store.close()


def of(request: Request) -> Context:
    found: Context = request.app.state.context
    return found
