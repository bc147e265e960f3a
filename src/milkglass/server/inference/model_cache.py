"""Keeps models in memory, and loads each when it is first requested.

The least recently requested model that is not in use makes room for the next.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from milkglass import device
from milkglass.errors import (
    Busy,
    Conflict,
    CorruptCheckpoint,
    MilkglassError,
    NotFound,
    UnsupportedModel,
    missing_words,
)
from milkglass.models.torch_model import MODEL_LOAD_LOCK
from milkglass.server.inference.generator import Engine
from milkglass.server.inference.model_runner import ModelRunner, TransformersRunner
from milkglass.server.logs import place_of
from milkglass.server.settings import ServerSettings
from milkglass.server.storage.store import ModelRecord

log = logging.getLogger("milkglass.server")
Task = Literal["classify", "embed", "generate"]
CacheKey = tuple[str, float, Task]  # with the time when the model was created, since a name can be reused


@dataclass(eq=False)
class LoadedModel:
    """Holds a model's engine for one task.

    Attributes:
        model: the record of the model.
        task: what the engine does.
        user_count: the number of requests that use the model now.
        engine: a future of the engine, which fails with what loading raised.
    """

    model: ModelRecord
    task: Task
    user_count: int = 0
    engine: Future[Engine[Any]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.engine.set_running_or_notify_cancel()  # from here on no one who waits can cancel it for the others

    @property
    def key(self) -> CacheKey:
        """Returns the entry's key in the cache."""
        return (self.model.id, self.model.created_at, self.task)

    def close(self) -> None:
        """Ends the engine and frees its weights, even if others still hold this entry."""
        engine, self.engine = self.engine.result(), Future()
        engine.close()


class ModelCache:
    """Keeps models in memory. `acquire` and `release` come in pairs. Only `close` removes a model that is in use.

    Each load has a thread of its own; those who wait for the model hold no thread.
    """

    def __init__(self, settings: ServerSettings, folder_of: Callable[[str], Path]) -> None:
        """Makes an empty cache. `folder_of` returns the folder of a model's id."""
        self._settings, self._folder_of = settings, folder_of
        self._lock = threading.Lock()
        self._is_closed = False
        self._entries: OrderedDict[CacheKey, LoadedModel] = OrderedDict()  # the least recently requested first

    def acquire(self, model: ModelRecord, task: Task) -> LoadedModel:
        """Returns a model's entry at once. A new entry's `engine` is done when the model is loaded.

        Raises:
            Busy: every loaded model is in use.
            UnsupportedModel: the model's kind cannot do the task.
        """
        if task == "generate" and model.kind != "decoder":
            raise UnsupportedModel(
                "this model is an encoder: it cannot generate", "use `milkglass classify`, or /classify"
            )
        if task == "embed" and model.kind != "encoder":
            raise UnsupportedModel("this model is a decoder: this server embeds with encoders alone", "name an encoder")
        with self._lock:
            entry = self._entries.get((model.id, model.created_at, task))
            if entry is None:
                evicted = self._make_room()
                entry = LoadedModel(model, task)
                self._entries[entry.key] = entry
                threading.Thread(target=self._load, args=(entry, evicted), name="load", daemon=True).start()
            entry.user_count += 1
            self._entries.move_to_end(entry.key)
        return entry

    def _make_room(self) -> LoadedModel | None:
        """Removes and returns the entry that a new one replaces, or None if there is room.

        Raises:
            Busy: every loaded model is in use.
        """
        if len(self._entries) < self._settings.max_loaded_models:
            return None
        for key, entry in self._entries.items():
            if not entry.user_count and entry.engine.done():
                return self._entries.pop(key)
        raise Busy("every loaded model is in use", "try again in a moment, or raise max_loaded_models")

    def release(self, entry: LoadedModel) -> None:
        """Ends one use of an entry that `acquire` returned."""
        with self._lock:
            entry.user_count -= 1

    def forget(self, model_id: str) -> None:
        """Removes a deleted model from memory. Raises Conflict while it is in use."""
        with self._lock:
            removed_entries = [entry for entry in self._entries.values() if entry.model.id == model_id]
            if any(entry.user_count or not entry.engine.done() for entry in removed_entries):
                raise Conflict("this model is answering someone right now", "try again in a moment")
            for entry in removed_entries:
                del self._entries[entry.key]
        for entry in removed_entries:
            entry.close()

    def close(self) -> None:
        """Closes all models, also those that are in use."""
        with self._lock:
            self._is_closed = True  # what is still being loaded closes itself
            loaded = [entry for entry in self._entries.values() if entry.engine.done()]
            self._entries.clear()
        for entry in loaded:
            entry.close()

    def _load(self, entry: LoadedModel, evicted: LoadedModel | None) -> None:
        """Loads the model, in its own thread, and completes the entry's future."""
        try:
            if evicted:
                evicted.close()  # its weights go before the new ones come
            engine = build_engine(self._folder_of(entry.model.id), entry.model, entry.task, self._settings)
            engine.start()
        except BaseException as error:  # noqa: BLE001  (anyone who waits must hear of it)
            with self._lock:
                self._entries.pop(entry.key, None)
            entry.engine.set_exception(error)
            return
        with self._lock:
            is_closed = self._is_closed
            entry.engine.set_result(engine)
        if is_closed:
            entry.close()
        log.info("model loaded for %s", entry.task)


def build_engine(folder: Path, model: ModelRecord, task: Task, settings: ServerSettings) -> Engine[Any]:
    """Loads a model's weights, and returns its engine for the task, which is not started.

    Raises:
        NotFound: the model was deleted meanwhile.
        CorruptCheckpoint: the weights are gone or do not fit the config.
        UnsupportedModel: a tensor is missing.
        MemoryError: there is too little memory.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from milkglass.server.inference.classifier import Classifier, Embedder
    from milkglass.server.inference.generator import Generator
    from milkglass.server.inference.model_runner import CachingRunner

    if not folder.is_dir():
        raise NotFound("there is no such model: it was deleted a moment ago", "list the models that the server has")
    if not any(folder.glob("*.safetensors")):
        log.warning("model not loaded: its folder holds no weights")
        raise CorruptCheckpoint("this model's weights are gone from the server's disk", "upload it again")
    disable_progress_bar()  # the log is not a terminal
    set_verbosity_error()  # a missing tensor is an error of ours, below, and not a table of transformers'
    if settings.inference_threads:
        torch.set_num_threads(settings.inference_threads)
    classes = {"classify": AutoModelForSequenceClassification, "embed": AutoModel, "generate": AutoModelForCausalLM}
    try:
        with MODEL_LOAD_LOCK:
            network, report = classes[task].from_pretrained(
                folder,
                dtype=device.serving_dtype(),
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
    _require_all_tensors(report, task)
    device.move(network.eval())
    if task == "classify":
        return Classifier(network, settings.max_batch, settings.max_waiting, needs_pad=model.kind == "decoder")
    if task == "embed":
        return Embedder(network, settings.max_batch, settings.max_waiting)
    runner: ModelRunner = TransformersRunner(network)
    if settings.prefix_cache:
        runner = CachingRunner(network, settings.prefix_cache // settings.max_loaded_models)
    return Generator(runner, settings.max_batch, settings.max_waiting)


def _require_all_tensors(report: dict[str, Any], task: Task) -> None:
    """Raises UnsupportedModel if transformers' loading report names a tensor that the task needs as missing."""
    missing_names = sorted(report.get("missing_keys", ()))
    if task == "embed":  # the mean of hidden states needs no pooler
        missing_names = [name for name in missing_names if not name.startswith("pooler.")]
    if missing_names:
        purpose, hint = str(task), "upload the whole model again"
        if task == "classify":
            purpose = "classify: fine-tune it first"
            hint = "`milkglass finetune` makes a model that classifies, and prints its name"
        raise UnsupportedModel(f"{missing_words('tensor', missing_names)}: this model cannot {purpose}", hint)
