"""Classifies or scores texts with the client's half: opens its folder, sends texts in frames, and reads the answers.

The number of texts is recorded before they are sent. A text that is sent twice therefore gets different noise, even if
the command is interrupted in between. Over HTTP, frames go through a `SplitConnection`, which knows no text, secret or
method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from milkglass import files
from milkglass.client.key.usage import exclusive_lock
from milkglass.client.remote.connection import Connection
from milkglass.errors import CorruptCheckpoint, KeyForOtherModel, RemoteError, UsageError
from milkglass.hidden_states.catalogue import restore_defence
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.defence import require_base
from milkglass.hidden_states.halves import read_description
from milkglass.hidden_states.tokens import PublicTokenizer
from milkglass.models.checkpoint import Checkpoint, json_text, read_json
from milkglass.models.file_names import CONFIG
from milkglass.progress import Progress, no_progress
from milkglass.split import folders
from milkglass.split.spec import ENCODER_HINT, SPLIT_PATH, EncoderInfo

TEXTS_PER_FRAME = 32  # the most texts of a frame that this client sends
FRAME_HTTP_HEADERS = {"Content-Type": "application/octet-stream"}
SendFrame = Callable[[bytes], NDArray[np.float32]]  # sends a frame and returns its logits (texts, outputs)


@dataclass(frozen=True)
class SplitClassifier:
    """Classifies or scores texts with the client's half and a server that has the other half.

    Attributes:
        description: the content of the half's split.json.
        client: the half itself, which encodes texts as frames and reads logits.
    """

    description: folders.ClientDescription
    client: EncoderClient = field(repr=False)

    @classmethod
    def open(
        cls, folder: Path, base: Checkpoint, description: folders.ClientDescription, text_count: int = 0
    ) -> SplitClassifier:
        """Opens the client's half, and records in its folder that `text_count` texts are to be sent.

        Args:
            folder: the half's folder.
            base: the model that was split.
            description: the content of the folder's split.json.
            text_count: how many texts are to be sent. 0: none, and nothing is recorded.

        Raises:
            CorruptCheckpoint: the folder is damaged.
            KeyForOtherModel: the base is not the model that was split.
        """
        defence = restore_defence(description.method, description.parameters, description.training)
        if not text_count:
            return cls(description, defence.load_client(base, folder))
        with exclusive_lock(folder / CONFIG):
            client = defence.load_client(base, folder)
            config = read_json(folder / CONFIG)
            files.write(folder / CONFIG, json_text({**config, "sent": int(config["sent"]) + text_count}))
        return cls(description, client)

    def answers(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        info: EncoderInfo,
        send_frame: SendFrame,
        progress: Progress = no_progress,
    ) -> NDArray[np.float64]:
        """Returns (texts, classes) the probabilities of the classes, or (texts, 1) the scores of a regression.

        All errors but RemoteError are raised before anything is sent.

        Args:
            texts: the texts, or the first one of each pair.
            pairs: the second text of each pair. None: texts are single.
            info: what the server says of its half.
            send_frame: sends a frame to the server's half.
            progress: receives the number of texts of each frame.

        Raises:
            KeyForOtherModel: the server does not have the other half of this split.
            CorruptCheckpoint: the server's half has another number of outputs.
            UsageError: pairs are given to a half for single texts, or the reverse.
            CodecError: a text cannot be sent.
            RemoteError: an answer has another shape.
        """
        self.require_matching(info, pairs is not None)
        row_counts = self.client.row_counts(self.client.reader.encode(texts, pairs).ids.lengths)
        logits_of_frames = []
        for frame_slice in frame_slices(row_counts, min(TEXTS_PER_FRAME, info.max_texts), info.max_states):
            frame = self.client.frame(texts[frame_slice], None if pairs is None else pairs[frame_slice])
            logits = self.client.receive(send_frame(frame))
            count = frame_slice.stop - frame_slice.start
            expected_shape = (count, self.description.output_count)
            if logits.shape != expected_shape:
                raise RemoteError(
                    f"the answer to {count} texts has the shape {logits.shape}, not {expected_shape}",
                    "is the server's half the one of this client?",
                )
            logits_of_frames.append(logits)
            progress(count)
        outputs = np.concatenate(logits_of_frames).astype(np.float64)
        return outputs if self.description.is_regression else np.asarray(softmax(outputs, 1))

    def require_matching(self, info: EncoderInfo, has_pairs: bool) -> None:
        """Checks that the server and the form of the texts match this half.

        Raises:
            KeyForOtherModel: the server does not have the other half of this split.
            CorruptCheckpoint: the server's half has another number of outputs.
            UsageError: the half was trained on pairs and the texts are single, or the reverse.
        """
        if info.weights != self.description.server:
            raise KeyForOtherModel(
                "the server has another half than this client's", "give it the folder made with this one"
            )
        if self.description.output_count != info.classes:
            raise CorruptCheckpoint(
                f"the client has {self.description.output_count} outputs, the server {info.classes}",
                "split the model again",
            )
        require_same_form(self.description, has_pairs)


def require_sendable(
    folder: Path,
    description: folders.ClientDescription,
    base: Checkpoint,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
) -> None:
    """Checks without a server whether texts can be sent.

    Raises:
        KeyForOtherModel: the base is not the model that was split.
        UsageError: the half was trained on pairs and the texts are single, or the reverse.
        CodecError: a text has no token, or is too long.
    """
    require_base(read_description(folder), folder, base)
    require_same_form(description, pairs is not None)
    length = restore_defence(description.method, description.parameters, description.training).training.max_length
    PublicTokenizer(base.folder, length).encode(texts, pairs)


def require_same_form(description: folders.ClientDescription, has_pairs: bool) -> None:
    """Raises UsageError if the half was trained on pairs and the texts are single, or the reverse."""
    if has_pairs != description.pairs:
        raise UsageError(
            "this model reads pairs of texts" if description.pairs else "this model reads single texts",
            "give a second text for each" if description.pairs else "leave the second texts out",
        )


def are_short_enough(
    reader: PublicTokenizer, texts: Sequence[str], pairs: Sequence[str] | None = None
) -> NDArray[np.bool_]:
    """Returns (texts,) whether each text is short enough to be sent. `PublicTokenizer.encode` refuses the others."""
    texts_and_pairs = (list(texts), None if pairs is None else list(pairs))
    batch = reader.tokenizer(*texts_and_pairs, truncation=False, split_special_tokens=True)
    return np.array([len(ids) <= reader.max_tokens for ids in batch["input_ids"]], np.bool_)


def frame_slices(row_counts: NDArray[np.int64], max_texts: int, max_states: int) -> Iterator[slice]:
    """Yields slices of consecutive texts for frames. A text with more than `max_states` states gets a slice of its own.

    Args:
        row_counts: (texts,) the number of hidden states of each text, which are the rows of a frame.
        max_texts: the most texts of a frame.
        max_states: the most hidden states of a frame.
    """
    start, frame_rows = 0, 0
    for index, row_count in enumerate(row_counts.tolist()):
        if index > start and (index - start == max_texts or frame_rows + row_count > max_states):
            yield slice(start, index)
            start, frame_rows = index, 0
        frame_rows += row_count
    if len(row_counts):
        yield slice(start, len(row_counts))


class SplitConnection:
    """Sends frames to a split server, and checks the answers, which are not trusted."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def info(self) -> EncoderInfo:
        """Asks the server for the description of its half. Raises RemoteError."""
        return EncoderInfo.of(self._connection.json("GET", SPLIT_PATH))

    def answer(self, frame: bytes) -> NDArray[np.float32]:
        """Sends a frame, and returns its logits (texts, outputs). Raises RemoteError.

        If an answer is lost, the same bytes with the same noise are sent again.
        """
        answer = self._connection.json("POST", SPLIT_PATH, may_repeat=True, content=frame, headers=FRAME_HTTP_HEADERS)
        return _logits(answer.get("logits"))


def _logits(answer_logits: Any) -> NDArray[np.float32]:
    """Returns an answer's logits. Raises RemoteError unless they are a table of finite numbers."""
    try:
        logits = np.asarray(answer_logits, np.float64).astype(np.float32)
    except (TypeError, ValueError, OverflowError):
        logits = np.empty(0, np.float32)
    if logits.ndim != 2 or not logits.size or not np.isfinite(logits).all():
        raise RemoteError("the answer is not a table of numbers", ENCODER_HINT)
    return logits
