"""A session joins a key, its codec and a server: text goes in and comes out, and only scrambled ids are sent.

    with Session.open("my.mgkey", passphrase, "https://gpu.example:8420", token) as session:
        job = session.finetune("model-1a2b3c4d", "train.jsonl", n_epochs=3)
        for result in session.classify(job.wait(), ["is it safe?"]):
            print(result.label, result.probability)

Before an id leaves, the server must show that its model was made with the key. All encoded text is counted under the
key (client/key/usage.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.client.codec.codec import Codec, codec_of
from milkglass.client.codec.conversation import as_text_list
from milkglass.client.key.file import UnlockedKey
from milkglass.client.plain_names import is_plain
from milkglass.client.remote.remote import Remote, Sampling
from milkglass.client.remote.responses import check_key
from milkglass.client.results import Answer, Classified, Conversation, Job
from milkglass.errors import EmptyText, RemoteError, UnsupportedModel, UsageError
from milkglass.progress import Log, Stage, no_log, no_stage
from milkglass.rows.labels import Scale
from milkglass.rows.messages import Message
from milkglass.rows.place import MAX_PLACES_SHOWN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from milkglass.rows.data_file import Source

TEXTS_PER_REQUEST = 64
MAX_UNCOUNTED_TOKENS = 64  # tokens of an answer that a killed program may leave uncounted
MIN_TRAINED_LENGTH = 8  # tokens; a server that says that rows were cut to fewer is not believed
NEWEST = "newest"  # for `labels_of`: the data that was sent last


class Session(AbstractContextManager["Session"]):
    """Classifies, generates and fine-tunes with one key on one server. Use it as a context manager, or close it.

    Each method raises RemoteError if the server fails, and CodecError for texts that do not fit the model. A `model` is
    a model's id on the server.

    Attributes:
        unlocked: the key file, which is written when label names or scales are recorded in it.
        codec: encodes and decodes under this key.
        remote: the server.
    """

    def __init__(self, unlocked: UnlockedKey, codec: Codec, remote: Remote, notice: Log = no_log) -> None:
        self.unlocked, self.codec, self.remote, self._notice = unlocked, codec, remote, notice

    @classmethod
    def open(
        cls,
        key: Path | str,
        passphrase: str,
        server: str,
        token: str | None = None,
        *,
        model: str | None = None,
        certificate: Path | str | None = None,
        allow_http: bool = False,
        notice: Log = no_log,
    ) -> Session:
        """Opens a key file, its model's tokenizer, and a connection.

        Args:
            key: the key file that `milkglass obfuscate` wrote.
            passphrase: opens the key.
            server: the server's address.
            token: the server's bearer token. It crosses a network only over HTTPS, unless `allow_http`.
            model: the original model, if it moved since the key was made.
            certificate: a PEM file with the server's certificate, if it is self-signed.
            allow_http: whether the token may cross a network unencrypted.
            notice: receives warnings, such as that a threshold of the key's audits was passed.

        Raises:
            KeyFileError: the key cannot be opened.
            ModelError: the original model's tokenizer cannot be read.
        """
        unlocked = UnlockedKey.open(Path(key), passphrase)
        codec = codec_of(unlocked, model)
        authority = None if certificate is None else Path(certificate)
        return cls(unlocked, codec, Remote(server, token, allow_http, authority), notice)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. A closed session sends nothing more."""
        self.remote.connection.close()

    # --- models -------------------------------------------------------------------------------------------------------
    def describe(self, model: str) -> dict[str, Any]:
        """Returns the server's description of a model. Raises KeyForOtherModel if it was not made with this key."""
        description = self.remote.model(model)
        if warning := check_key(description, self.unlocked.key, model):
            self._notice(warning)
        return description

    # --- classification -----------------------------------------------------------------------------------------------
    def classify(
        self,
        model: str,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        truncate: bool = True,
        labels_of: str | None = None,
        stage: Stage = no_stage,
    ) -> list[Classified]:
        """Classifies texts, or scores them with a regression. Returns one result for each, in order.

        Args:
            pairs: the second text of each, if the model reads pairs.
            truncate: whether texts are cut to the length that the model's training rows were cut to. `notice` receives
                how many were, and `Classified.is_cut` says which. Otherwise texts that are too long for the model are
                refused before any is sent.
            labels_of: the job whose label names or scale are used, or "newest" for the data that was sent last.
                None: the job that made the model.
            stage: receives how many texts are done.

        Raises:
            CodecError: a text cannot be sent; the message has its number.
            UsageError: the key has no labels of that job.
        """
        self._require_labels(labels_of)
        texts = as_text_list(texts)
        description = self.describe(model)
        trained_length = self._trained_length(description.get("job")) if truncate else None
        encoded = self.codec.encode(texts, pairs, trained_length, truncate)
        if encoded.cut_indices:
            self._notice_cut(len(texts), encoded.cut_indices, trained_length)
        job = description.get("job")
        label_names, scale = self._label_names(model, job, labels_of), self._scale(model, job, labels_of)
        self._count(len(texts), sum(map(len, encoded.ids)))
        progress, results, labels_fit = stage("classify", len(texts)), list[Classified](), True
        cut_indices = {*encoded.cut_indices}
        for start in range(0, len(texts), TEXTS_PER_REQUEST):
            batch = slice(start, start + TEXTS_PER_REQUEST)
            token_type_ids = encoded.token_type_ids[batch] if encoded.token_type_ids is not None else None
            for prediction in self.remote.classify(model, encoded.ids[batch], token_type_ids):
                has_all_names = sorted(label_names) == list(range(len(prediction.probabilities)))
                labels_fit = labels_fit and has_all_names
                classified = Classified.of(prediction, label_names if has_all_names else {}, scale)
                results.append(replace(classified, is_cut=len(results) in cut_indices))
            progress(len(encoded.ids[batch]))
        self._notice_missing_names(model, results, label_names, labels_fit, scale)
        return results

    def _trained_length(self, job: object) -> int | None:
        """Returns the tokens to which a job's rows were cut, as the server says. None: it says nothing plausible."""
        if not isinstance(job, str) or not is_plain(job):
            return None
        try:
            settings = self.remote.job(job).get("hyperparameters")
        except RemoteError as error:
            if error.status == 404:  # the job was deleted
                return None
            raise
        length = settings.get("max_length") if isinstance(settings, Mapping) else None
        return length if isinstance(length, int) and MIN_TRAINED_LENGTH <= length <= self.codec.max_tokens else None

    def _notice_cut(self, text_count: int, cut_indices: Sequence[int], trained_length: int | None) -> None:
        """Reports which of `text_count` texts are cut, and to how many tokens."""
        shown = [str(index + 1) for index in cut_indices[:MAX_PLACES_SHOWN]]
        if len(cut_indices) > len(shown):
            shown.append(f"{len(cut_indices) - len(shown):,} more")
        numbers = "" if text_count == 1 else f" (number {', '.join(shown)})"
        reason = (
            "as the rows were that the model was trained with" if trained_length else "which is what the model takes"
        )
        noun, verb = "text" if text_count == 1 else "texts", "is" if len(cut_indices) == 1 else "are"
        limit = trained_length or self.codec.max_tokens
        self._notice(f"{len(cut_indices):,} of {text_count:,} {noun} {verb} cut to {limit} tokens, {reason}{numbers}")

    def _require_labels(self, labels_of: str | None) -> None:
        """Raises UsageError for a job of which the key has neither labels nor a scale."""
        key_info = self.unlocked.key.info
        if labels_of not in (None, NEWEST, *key_info.labels_by_job, *key_info.scales_by_job):
            jobs = ", ".join((*key_info.labels_by_job, *key_info.scales_by_job)) or "none"
            raise UsageError(f"the key knows no labels of the job {labels_of}", f"it knows those of: {jobs}; or newest")

    def _label_names(self, model: str, job: object, labels_of: str | None) -> dict[int, str]:
        """Returns label names by number. The job in the model's name takes precedence over the server's statement."""
        key_info = self.unlocked.key.info
        labels = key_info.labels_by_job
        if labels_of is None:
            numbers_by_name = key_info.labels_of(model) or labels.get(str(job)) or {}
        elif labels_of == NEWEST:
            numbers_by_name = key_info.labels or {}
        else:
            numbers_by_name = labels.get(labels_of, {})
        return {number: name for name, number in numbers_by_name.items()}

    def _scale(self, model: str, job: object, labels_of: str | None) -> Scale | None:
        """Returns the scale of a regression's scores, of the job that `_label_names` would take."""
        key_info = self.unlocked.key.info
        if labels_of == NEWEST:
            return key_info.scale
        return key_info.scale_of(model, str(job)) if labels_of is None else key_info.scale_of(labels_of, labels_of)

    def _notice_missing_names(
        self, model: str, results: Sequence[Classified], names: Mapping[int, str], labels_fit: bool, scale: Scale | None
    ) -> None:
        """Reports that results are shown as numbers, since the key has no names or scale that fit them."""
        if any(result.score is not None for result in results):
            if scale is None:
                self._notice(f"the key has no scale for {model}, so its own numbers are shown; see --labels-of")
        elif not names:
            self._notice(f"the key has no label names for {model}, so its numbers are shown; see --labels-of")
        elif not labels_fit:
            self._notice(f"the key's {len(names)} label names do not fit the answers of {model}; numbers are shown")

    # --- generation ---------------------------------------------------------------------------------------------------
    def encode_prompt(self, text: str, system: str | None = None, chat: bool | None = None) -> NDArray[Any]:
        """Returns the scrambled ids of a prompt.

        Args:
            text: the prompt.
            system: the system's message, in the chat template.
            chat: whether the text is put into the chat template. None: if the model has one.

        Raises:
            CodecError: the text is empty or too long, or the model has no template.
            UsageError: there is a system's message, and no template is used.
        """
        uses_template = self.codec.has_chat_template if chat is None else chat
        if system is not None and not uses_template:
            raise UsageError("a system message needs the chat template", "leave --raw out")
        if not text.strip():
            raise EmptyText("the prompt is empty", "give a text, or pipe one in")
        if not uses_template:
            return self.codec.encode([text]).ids[0]
        return self.codec.encode_chat([*_system_messages(system), {"role": "user", "content": text}])

    def generate(self, model: str, prompt: str | NDArray[Any], sampling: Sampling | None = None) -> Answer:
        """Returns the answer to a text, or to the ids that `encode_prompt` returned.

        The request is sent when the first piece is read.

        Args:
            model: the model's id on the server.
            prompt: a text, or scrambled ids.
            sampling: how tokens are drawn. Fields that are not set are the model's (`codec.sampling`), and
                `stop_token_ids` the codec's.

        Raises:
            UnsupportedModel: the model is an encoder, or the key's ids name no token.
        """
        ids = self.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        self.require_generator(model)
        return self._answer(model, ids, sampling)

    def chat(self, model: str, system: str | None = None, sampling: Sampling | None = None) -> Conversation:
        """Returns a conversation in the model's chat template.

        Each turn's request is sent when the first piece of its answer is read.

        Raises NoChatTemplate if it has none, UnsupportedModel for an encoder or a key whose ids name no token.
        """
        system_messages = _system_messages(system)
        self.require_generator(model)  # first: an encoder has no template either
        self.codec.encode_chat([*system_messages, {"role": "user", "content": "hi"}])  # raises before anyone types

        def ask(turns: list[Message]) -> Answer:
            return self._answer(model, self.codec.encode_chat(turns), sampling)

        return Conversation(ask, system_messages, keeps_answer_ids=True)

    def require_generator(self, model: str) -> None:
        """Raises UnsupportedModel for a model, or a key, by which no text can be generated."""
        if not self.codec.can_decode:
            raise UnsupportedModel(
                "under this key an id names no token: no answer can be read",
                "use `milkglass classify`; for answers make a key with --scheme obfuslm",
            )
        if self.describe(model).get("kind") == "encoder":
            raise UnsupportedModel(f"{model} is an encoder: it cannot generate", "use `milkglass classify`")

    def _answer(self, model: str, ids: NDArray[Any], sampling: Sampling | None = None) -> Answer:
        """Returns an answer of a model that is already checked."""
        sampling = (sampling or Sampling()).with_defaults(self.codec.sampling.values)
        if not sampling.stop_token_ids:
            sampling = replace(sampling, stop_token_ids=tuple(self.codec.stop_ids.tolist()))
        answer = Answer(iter(()), len(ids))
        answer.pieces = self._pieces(model, ids, sampling, answer)
        return answer

    def _pieces(self, model: str, ids: NDArray[Any], sampling: Sampling, answer: Answer) -> Iterator[str]:
        """Yields the text of an answer as its ids arrive, adds these to `answer`, and counts them under the key."""
        self._count(1, len(ids))
        decoder, counted_tokens = self.codec.stream_decoder(), 0
        try:
            for new_ids in self.remote.generate(model, ids, sampling):
                answer.ids += new_ids
                if answer.token_count - counted_tokens >= MAX_UNCOUNTED_TOKENS:
                    self._count(0, answer.token_count - counted_tokens)
                    counted_tokens = answer.token_count
                yield decoder.push(new_ids)
            yield decoder.flush()
        finally:  # the answer is text under this key too, and so is the part of one that is cut off
            self._count(0, answer.token_count - counted_tokens)

    # --- fine-tuning --------------------------------------------------------------------------------------------------
    def finetune(
        self,
        /,
        model: str,
        data: Source | str,
        *,
        validation: Source | str | None = None,
        task: str | None = None,
        suffix: str | None = None,
        hold_out: bool = False,
        skip_long: bool = False,
        stage: Stage = no_stage,
        **hyperparameters: Any,
    ) -> Job:
        """Scrambles rows here, sends them and starts a job. Label names and the scale of scores stay in the key.

        Args:
            data: a file, or a `DataFile` that names its columns. `milkglass finetune --help` shows the shapes of rows.
            validation: rows by which epochs are compared; the best epoch is kept.
            task: "classification", "regression" or "causal-lm". None: decided by the data.
            suffix: ends the fine-tuned model's name.
            hold_out: whether a tenth of the rows, which are then not trained on, takes the place of `validation`.
            skip_long: whether conversations without an answer within `max_length` tokens are left out. Otherwise they
                are refused.
            stage: receives how many rows are written and bytes sent.
            **hyperparameters: fields of `server.spec.Hyperparameters`. `training_defaults` has those that are left out.

        Returns:
            The job, as the server created it.

        Raises:
            CodecError: rows cannot be read, or do not fit the model.
            UsageError: the server would refuse a hyperparameter, or there are too few rows to hold some out.
        """
        from milkglass.client.data.training_rows import require_generator
        from milkglass.client.training_request import TrainingRequest, require_hyperparameters, require_suffix

        hyperparameters = require_hyperparameters(hyperparameters, str)  # before a file is read
        require_suffix(suffix)  # here, so that no other is sent
        request = TrainingRequest.of(
            self.unlocked.key, self.codec.max_tokens, data, validation, task, hold_out, hyperparameters, self._notice
        )
        description = self.describe(model)
        require_generator(request.source, request.summary, description.get("kind"))
        self._require_layers(request.settings, description.get("layers"))
        with tempfile.TemporaryDirectory(prefix="milkglass-") as scratch:  # it holds nothing but scrambled ids
            paths, train_counts = request.write(
                self.unlocked, self.codec, Path(scratch), skip_long, stage, self._notice
            )
            self._notice(request.announcement(train_counts.row_count))
            self.unlocked = self.unlocked.remember(request.labels)
            train, *validation_files = (self.remote.upload(path, stage) for path in paths)
        job = self.remote.create_job(
            model, train, request.settings, validation_files[0] if validation_files else None, suffix
        )
        self._notice(f"job: {job['id']}")  # at once: anyone who is cut off from here on can find it again
        self.unlocked = self.unlocked.remember(request.labels, str(job["id"]), model)
        return Job(self.remote, str(job["id"]), request.summary.task, job.get("status"))

    def _require_layers(self, settings: Mapping[str, Any], layers: int | None) -> None:
        """Raises UsageError if LoRA would have no layer to adapt. Reports defaults that are lowered for it."""
        from milkglass.server.spec import Hyperparameters

        hyperparameters = Hyperparameters(**settings)
        fitted = hyperparameters.for_layers(layers)
        if fitted is not hyperparameters:
            self._notice(
                f"the model has {layers} layer{'' if layers == 1 else 's'}: so that LoRA adapts some, its first "
                f"{fitted.full_first} and last {fitted.full_last} are trained in full, not "
                f"{hyperparameters.full_first} and {hyperparameters.full_last}"
            )

    def _count(self, texts: int, tokens: int) -> None:
        """Counts encoded text under the key, and reports a threshold that was passed."""
        self.unlocked.count(texts, tokens, self._notice)


def _system_messages(text: str | None) -> list[Message]:
    """Returns the messages with which a conversation begins: the system's, or none."""
    return [] if text is None else [{"role": "system", "content": text}]
