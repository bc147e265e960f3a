"""`serve --record FOLDER`: keeps what the server sees, as a transcript for an audit. It is off by default.

There is one transcript for a model and all that was fine-tuned from it, under FOLDER/MODEL: the weights as uploaded and
as tuned, the ids that it was trained on, was sent and answered. The server receives all of this anyway, but does not
keep inference requests without --record. Tell the people whose data it is before you record.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milkglass import files
from milkglass.sequences import Sequences
from milkglass.server.storage.store import ModelRecord, Store
from milkglass.server.storage.training_rows import TrainingRows

if TYPE_CHECKING:
    from milkglass.threat.transcript_file import TranscriptRecorder

log = logging.getLogger("milkglass.server")
Rows = Sequence[Sequence[int]]


class Recording:
    """Records what the routes and the job thread see. A failure to record is logged and stops no request."""

    def __init__(self, folder: Path | None, store: Store) -> None:
        self._folder, self._store = folder, store
        self._recorders: dict[str, TranscriptRecorder] = {}
        self._lock = threading.Lock()

    def record_model(self, model: ModelRecord, folder: Path) -> None:
        """Records a model that was published: uploaded, or the result of a job."""
        self._record(model, lambda recorder: recorder.add_weights(folder, tuned=model.job is not None))

    def record_training(self, model: ModelRecord, train: Path) -> None:
        """Records the rows of a job's training file, `train`, under the model that is tuned."""

        def record(recorder: TranscriptRecorder) -> None:
            rows = TrainingRows.open(train)
            lengths, flat_ids = rows.map_tensor("lengths"), rows.map_tensor("input_ids")
            recorder.add_tokens(Sequences(flat_ids.astype(np.int64), lengths.astype(np.int64)), "train")

        self._record(model, record)

    def record_inputs(self, model: ModelRecord, rows: Rows) -> None:
        """Records rows of ids that were sent for classification or embedding."""
        self._record(model, lambda recorder: recorder.add_tokens(Sequences.of(rows), "infer"))

    def record_answers(self, model: ModelRecord, prompts: Rows, answers: Rows) -> None:
        """Records prompts that were sent, and the ids that were answered."""

        def record(recorder: TranscriptRecorder) -> None:
            sent_ids = Sequences.of(prompts)
            recorder.add_tokens(sent_ids, "infer")
            recorder.add_outputs(Sequences.of(answers), sent_ids)

        self._record(model, record)

    def _record(self, model: ModelRecord, record: Callable[[TranscriptRecorder], Any]) -> None:
        if self._folder is None:
            return
        try:
            record(self._open_recorder(model))
        except Exception as error:  # noqa: BLE001 - safetensors' own are bare; a good answer must go out all the same
            log.error("could not record (%s)", type(error).__name__)

    def _open_recorder(self, model: ModelRecord) -> TranscriptRecorder:
        """Returns the recorder of the uploaded model that this one was tuned from, in one step or several."""
        # Imported here, with all of the threat model behind it, since few servers record
        from milkglass.threat.transcript_file import TranscriptRecorder

        assert self._folder is not None
        root, visited = model, {model.id}
        while root.parent and root.parent not in visited:
            visited.add(root.parent)
            parent = self._store.models.find(root.parent)
            if parent is None:
                break
            root = parent
        with self._lock:
            if root.id not in self._recorders:
                files.make_private_dir(self._folder)
                self._recorders[root.id] = TranscriptRecorder.open(
                    self._folder / root.id, model.vocab_size, root.key_id
                )
            return self._recorders[root.id]
