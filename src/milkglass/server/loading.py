"""Models in memory: loaded when first asked for, kept while used, the longest unused one put out for the next."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from milkglass.errors import Busy, Conflict, CorruptCheckpoint, MilkglassError, UnsupportedModel
from milkglass.server.engine import Engine
from milkglass.server.guard import place_of
from milkglass.server.settings import Settings
from milkglass.server.store import Model

log = logging.getLogger("milkglass.server")
Task = Literal["classify", "generate"]


@dataclass
class Entry:
    model_id: str
    users: int = 0
    engine: Future[Engine[Any]] = field(default_factory=Future)


class Loader:
    """`acquire` and `release` come in pairs; a model that is in use is never put out."""

    def __init__(self, settings: Settings, folder: Callable[[str], Path]) -> None:
        self._settings, self._folder = settings, folder
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, Task], Entry] = OrderedDict()  # the longest unused first

    def acquire(self, model: Model, task: Task) -> Engine[Any]:
        """Raises Busy when every loaded model is in use, ModelError when this one cannot be loaded. May take long."""
        if task == "generate" and model.kind != "decoder":
            raise UnsupportedModel("this model is an encoder: it cannot generate", "use /classify")
        key = (model.id, task)
        with self._lock:
            entry, put_out = self._entries.get(key), None
            mine = entry is None
            if entry is None:
                put_out = self._make_room()
                entry = self._entries[key] = Entry(model.id)
            entry.users += 1
            self._entries.move_to_end(key)
        try:
            if put_out:
                put_out.engine.result().close()
            if mine:
                self._load(entry, model, task)
            return entry.engine.result()
        except BaseException as error:
            if mine and not entry.engine.done():
                entry.engine.set_exception(error)
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            raise

    def _make_room(self) -> Entry | None:
        if len(self._entries) < self._settings.max_loaded_models:
            return None
        for key, entry in self._entries.items():
            if not entry.users:
                return self._entries.pop(key)
        raise Busy("every loaded model is in use", "try again in a moment, or raise max_loaded_models")

    def release(self, model_id: str, task: Task) -> None:
        with self._lock:
            entry = self._entries.get((model_id, task))
            if entry:
                entry.users -= 1

    def forget(self, model_id: str) -> None:
        """Put a model out for good. Raises Conflict while it is in use."""
        with self._lock:
            keys = [key for key, entry in self._entries.items() if entry.model_id == model_id]
            if any(self._entries[key].users for key in keys):
                raise Conflict("this model is answering somebody right now", "try again in a moment")
            gone = [self._entries.pop(key) for key in keys]
        for entry in gone:
            entry.engine.result().close()

    def close(self) -> None:
        with self._lock:
            gone = list(self._entries.values())
            self._entries.clear()
        for entry in gone:
            if entry.engine.done() and not entry.engine.exception():
                entry.engine.result().close()

    def _load(self, entry: Entry, model: Model, task: Task) -> None:
        engine = build(self._folder(model.id), model, task, self._settings)
        engine.start()
        entry.engine.set_result(engine)
        log.info("model loaded for %s", task)


def build(folder: Path, model: Model, task: Task, settings: Settings) -> Engine[Any]:
    """Read the weights. Raises CorruptCheckpoint or UnsupportedModel; a missing tensor is never made up."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    from milkglass.server.classifying import Classifier
    from milkglass.server.generating import Generator

    disable_progress_bar()  # the log is no terminal
    if settings.inference_threads:
        torch.set_num_threads(settings.inference_threads)
    kind = AutoModelForSequenceClassification if task == "classify" else AutoModelForCausalLM
    on_gpu = torch.cuda.is_available()
    try:
        network, report = kind.from_pretrained(
            folder,
            dtype="auto" if on_gpu else torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (MilkglassError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  (the library raises what it likes; its text may quote the config)
        log.warning("model not loaded: %s", place_of(error))
        hint = "obfuscate and upload it again"
        raise CorruptCheckpoint(f"the weights don't fit the config: {type(error).__name__}", hint) from error
    _require_whole(report, task)
    network.eval().to("cuda" if on_gpu else "cpu")
    if task == "classify":
        return Classifier(network, settings.max_batch, settings.max_waiting, needs_pad=model.kind == "decoder")
    return Generator(network, settings.max_batch, settings.max_waiting)


def _require_whole(report: dict[str, Any], task: Task) -> None:
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        purpose = "classify: fine-tune it first" if task == "classify" else "generate"
        raise UnsupportedModel(
            f"{len(missing)} tensors are missing ({missing[0]}): this model cannot {purpose}",
            "the server never makes weights up",
        )
