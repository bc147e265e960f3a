"""Encodes text to scrambled ids and decodes them.

The model's own tokenizer reads the text, and one `take` with sigma scrambles its ids, without a Python loop over
tokens; with aliases or randomised responses an id is drawn for each token. Lengths are not hidden: a text of 40 tokens
becomes 40 scrambled ids. Shapes: n original ids, n' scrambled ids, t tokens of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.aliases import AliasChoices, IdRandomiser, StreamSource, secret_stream
from milkglass.client.codec.conversation import (
    as_text_list,
    render,
    require_encodable,
    require_messages,
    split_marked,
    supports_tools,
    template_option_names,
    unused_characters,
)
from milkglass.client.codec.encoded import Encoded, Ids, LabelledIds, Tool, answerless_error, encode_conversations
from milkglass.client.codec.kept_ids import ANSWER_IDS, KeptIds
from milkglass.client.codec.streaming import StreamDecoder
from milkglass.client.key.file import UnlockedKey
from milkglass.client.key.key import Key
from milkglass.client.model_config import ModelSampling
from milkglass.client.upload_names import tokenizer_digest
from milkglass.errors import CodecError, EmptyText, IdOutOfRange, KeyForOtherModel, ModelError, TooLong, UsageError
from milkglass.models.checkpoint import read_generation
from milkglass.models.pieces import TextPiece, special_ids_around
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import Tokenizer, decodes_by_byte, load_tokenizer, token_limit
from milkglass.rows.messages import Message


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes under a key, with its model's tokenizer.

    Attributes:
        tokenizer: the model's own tokenizer, with the original ids.
        sigma: (n,) the scrambled id of each original id, or the first of several.
        inverse: (n',) the original id of each scrambled id.
        is_visible: (n,) whether each original id is an ordinary token of the tokenizer.
        is_token: (n,) whether each original id is a token of the tokenizer, special or not.
        max_tokens: the most tokens that the model takes.
        alias_choices: the scrambled ids of each token. None: each token has one.
        id_randomiser: replaces ids at random (randomised response). None: ids are sent as they are.
        new_stream: returns the random stream of one call, which chooses among the several ids of a token.
        can_decode: whether a scrambled id names one token, so that ids can be decoded.
        key_id: the key's identifier. None: this codec does not scramble.
        sampling: the settings of the model's own generation_config.json.
    """

    tokenizer: Tokenizer = field(repr=False)
    sigma: Ids = field(repr=False)
    inverse: NDArray[np.int64] = field(repr=False)
    is_visible: NDArray[np.bool_] = field(repr=False)
    is_token: NDArray[np.bool_] = field(repr=False)
    max_tokens: int
    alias_choices: AliasChoices | None = field(default=None, repr=False)
    id_randomiser: IdRandomiser | None = field(default=None, repr=False)
    new_stream: StreamSource = field(default=secret_stream, repr=False)
    can_decode: bool = True
    key_id: str | None = None
    sampling: ModelSampling = field(default_factory=ModelSampling)
    _token_texts: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, key: Key, folder: Path, new_stream: StreamSource = secret_stream) -> Codec:
        """Opens the codec of a key with the tokenizer of the original model's folder.

        Args:
            folder: has the original model's tokenizer.
            new_stream: returns the random stream that chooses among the several ids of a token.

        Raises:
            KeyForOtherModel: the folder's tokenizer is not the one that the key was made with.
            ModelError: the tokenizer cannot be read, or special tokens have several ids.
        """
        digest, expected = tokenizer_digest(folder), key.info.tokenizer_digest
        if digest != expected:
            raise KeyForOtherModel(
                f"the tokenizer in {folder.name} is {digest}, the key was made with {expected}",
                "give the folder of the model that was scrambled",
            )
        tokenizer = load_tokenizer(folder)
        first_ids = key.first_ids
        size = len(first_ids)
        is_token = np.zeros(size, np.bool_)
        vocabulary_ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
        is_token[vocabulary_ids[vocabulary_ids < size]] = True
        is_visible = is_token.copy()
        special_ids = np.array(tokenizer.special_ids, np.int64)
        special_ids = special_ids[special_ids < size]
        is_visible[special_ids] = False
        alias_choices = AliasChoices.of(key)
        if alias_choices is not None and (alias_choices.counts[special_ids] > 1).any():
            raise ModelError(
                f"{int((alias_choices.counts[special_ids] > 1).sum())} special tokens have several ids under this key",
                "mark them as special in the model's tokenizer.json and make a new key",
            )
        max_tokens = token_limit(folder, tokenizer)
        can_decode = not key.has_shared_ids
        id_randomiser = IdRandomiser.of(key)
        sampling = ModelSampling.of(read_generation(folder) or key.info.sampling)
        return cls(
            tokenizer, first_ids, key.inverse, is_visible, is_token, max_tokens, alias_choices, id_randomiser,
            new_stream, can_decode, key.identifier, sampling,
        )  # fmt: skip

    # --- text to ids --------------------------------------------------------------------------------------------------
    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_length: int | None = None,
        truncate: bool = False,
        reserved_tokens: int = 0,
        parse_special: bool = False,
    ) -> Encoded:
        """Encodes texts to scrambled ids.

        If `parse_special` is not set, the text of a special token stays text: no one can end a text early by writing
        "[SEP]".

        Args:
            texts: the texts, or the first one of each pair.
            pairs: the second text of each pair, if the model reads pairs.
            max_length: the most tokens, if fewer than the model takes.
            truncate: whether longer texts are cut. Otherwise they are refused.
            reserved_tokens: the number of tokens that the caller adds to each text. They count against the limit.
            parse_special: whether the text of a special token is that token, as in prompts that a program put together.

        Raises:
            EmptyText: a text has no token. The messages of EmptyText and TooLong have the text's number.
            TooLong: a text is too long.
            IdOutOfRange: the tokenizer has a token that the model has no row for.
            UsageError: the numbers of texts and pairs differ, or the limit leaves no room for a token.
        """
        texts = as_text_list(texts)
        require_encodable(texts)
        if pairs is not None:
            pairs = as_text_list(pairs)
            require_encodable(pairs)
            if len(pairs) != len(texts):
                raise UsageError(f"{len(texts)} texts and {len(pairs)} pairs", "give one pair a text")
        if not texts:
            return Encoded([], None if pairs is None else [])
        special_count = self.tokenizer.num_special_tokens_to_add(pair=pairs is not None)
        limit = self._limit(max_length, special_count + reserved_tokens, 1 if pairs is None else 2)
        tokenizer_inputs = (texts, pairs)
        splits_special = not parse_special
        batch = self.tokenizer(*tokenizer_inputs, truncation=False, split_special_tokens=splits_special)
        lengths = np.fromiter(map(len, batch["input_ids"]), np.int64)
        if (lengths <= special_count).any():
            raise EmptyText.of(int((lengths <= special_count).argmax()), "has no token", "leave empty texts out")
        too_long = tuple(np.flatnonzero(lengths + reserved_tokens > limit).tolist())
        if not truncate:
            self._require_max_length(lengths + reserved_tokens, limit)
        elif too_long:  # the tokenizer itself cuts: it knows which end, and keeps the special tokens
            batch = self.tokenizer(
                *tokenizer_inputs,
                truncation=True,
                max_length=limit - reserved_tokens,
                split_special_tokens=splits_special,
            )
            self._require_max_length(np.fromiter(map(len, batch["input_ids"]), np.int64) + reserved_tokens, limit)
        token_types = batch.get("token_type_ids")
        return Encoded(
            self.scramble_lists(batch["input_ids"]),
            None if token_types is None else [np.asarray(row, np.int8) for row in token_types],
            too_long,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        max_length: int | None = None,
        truncate: bool = False,
        tools: Sequence[Tool] = (),
        answer_start: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> Ids:
        """Encodes a conversation in the model's own template.

        The text of a special token in a message stays text. If a message has the scrambled ids of an answer
        (`kept_ids.ANSWER_IDS`), what it repeats of the answer is sent as these ids.

        Args:
            messages: the conversation's messages, the oldest first.
            add_generation_prompt: whether the template's start of an answer follows.
            max_length: the most tokens, if fewer than the model takes.
            truncate: whether a conversation that is too long loses its end. Otherwise it is refused.
            tools: functions that the template shows to the model.
            answer_start: text with which the answer is made to begin, after the template's own start.
            options: values of further variables of the template (`template_option_names`), such as `enable_thinking`.

        Raises:
            NoChatTemplate: the model has no template.
            TooLong: the conversation is too long.
            CodecError: the template refuses the conversation, or has no place for tools or options.
        """
        if tools and not self.supports_tools:
            raise CodecError("the model's chat template has no place for tools", "leave tools out")
        require_messages(self.tokenizer, messages)
        messages = [self._with_visible_answer(message) for message in messages]
        rendered = render(self.tokenizer, messages, add_generation_prompt, tools, options, self.decode)
        ids = rendered.append(answer_start).tokenize(self.tokenizer)[0]
        limit = self._limit(max_length)
        if not truncate:
            self._require_max_length(np.array([len(ids)]), limit)
        return self._scramble_except_kept(ids, rendered.kept_ids)[:limit]

    def encode_prompt(self, text: str, answers: Sequence[Sequence[int]] = ()) -> Ids:
        """Encodes a prompt that a program put together: the text of a special token in it is that token.

        Args:
            answers: the scrambled ids of each answer that the prompt may repeat. What it repeats is sent as these ids.

        Raises:
            CodecError: as in `encode`.
        """
        require_encodable([text])
        kept_ids, marked = KeptIds(self.decode, unused_characters([text])), text
        for ids in answers:
            marked = kept_ids.mark_prompt(marked, self._visible_ids(ids))
        if not kept_ids.kept_by_mark:
            return self.encode([text], parse_special=True).ids[0]
        rendered = split_marked(kept_ids, marked, lambda part: [TextPiece(part, False)] if part else [])
        prefix, suffix = special_ids_around(self.tokenizer)
        original = [*prefix, *rendered.tokenize(self.tokenizer)[0], *suffix]
        self._require_max_length(np.array([len(original)]), self._limit(None))
        return self._scramble_except_kept(original, rendered.kept_ids)

    def _scramble_except_kept(self, ids: Sequence[int], kept_ids: Sequence[int]) -> Ids:
        """Returns the scrambled ids of original ones, among which -1, -2, ... stand for the scrambled `kept_ids`."""
        original, scrambled = np.array(ids, np.int64), np.array(kept_ids, np.int32)
        is_kept = original < 0
        kept_scrambled = scrambled[-1 - original[is_kept]]
        original[is_kept] = self.inverse[kept_scrambled]
        all_scrambled = self.scramble_lists([original.tolist()])[0]
        all_scrambled[is_kept] = kept_scrambled
        return all_scrambled

    def _with_visible_answer(self, message: Message) -> Message:
        """Returns a message without those ids of its answer that have no text, or without all if none can be read."""
        ids = message.get(ANSWER_IDS)
        if not ids or not self.can_decode:
            return {name: value for name, value in message.items() if name != ANSWER_IDS}
        return {**message, ANSWER_IDS: self._visible_ids(ids)}

    def _visible_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns the scrambled ids that stand for ordinary tokens, and leaves the others out."""
        array = _id_array(ids)
        return array[self.is_visible[self._unscramble(array)]].tolist()

    def encode_examples(
        self,
        conversations: Sequence[Sequence[Message]],
        max_length: int | None = None,
        truncate: bool = False,
        tools: Sequence[Sequence[Tool]] = (),
    ) -> LabelledIds:
        """Encodes conversations as supervised examples, with labels of -100 outside the assistant's turns.

        Args:
            max_length: the most tokens, if fewer than the model takes.
            truncate: whether conversations that are too long lose their end. Otherwise they are refused.
            tools: for each conversation the functions that the template shows to the model. Empty: there are none.

        Raises:
            TooLong: a conversation is too long, or loses all answers.
            CodecError: a conversation cannot be rendered, or has no answer.
        """
        examples, lengths = self._encode_conversations(conversations, max_length, tools)
        if not truncate:
            self._require_max_length(lengths, self._limit(max_length))
        for index in examples.lost_answer_starts:
            raise answerless_error(
                self.tokenizer, conversations[index], index, int(lengths[index]), examples, self._limit(max_length)
            )
        return examples

    def encode_answered(
        self,
        conversations: Sequence[Sequence[Message]],
        max_length: int | None = None,
        tools: Sequence[Sequence[Tool]] = (),
    ) -> LabelledIds:
        """Encodes as `encode_examples` with `truncate`, but leaves out conversations without an answer in the limit."""
        return self._encode_conversations(conversations, max_length, tools)[0]

    def _encode_conversations(
        self, conversations: Sequence[Sequence[Message]], max_length: int | None, tools: Sequence[Sequence[Tool]]
    ) -> tuple[LabelledIds, NDArray[np.int64]]:
        """Returns the examples, cut to the limit, and (conversations,) the uncut tokens of each conversation."""
        return encode_conversations(self.tokenizer, conversations, self._limit(max_length), self.scramble_lists, tools)

    def encode_causal(self, texts: Sequence[str], max_length: int | None = None, truncate: bool = False) -> LabelledIds:
        """Encodes texts for causal training: an end-of-sequence token follows each, and every token has a label.

        See `encode` for the arguments and errors. The end-of-sequence token counts against the limit.
        """
        encoded = self.encode(texts, None, max_length, truncate, reserved_tokens=len(self.stop_ids))
        ids = [np.concatenate([row, self.stop_ids]).astype(np.int32) for row in encoded.ids]
        return LabelledIds(ids, [row.copy() for row in ids], tuple(range(len(ids))), encoded.cut_indices)

    # --- ids without text ---------------------------------------------------------------------------------------------
    @property
    def without_scrambling(self) -> Codec:
        """Returns a codec whose ids are the original ones, which are never sent.

        It is for programs that play client and server.
        """
        identity = np.arange(len(self.sigma))
        unkeyed = replace(self, alias_choices=None, id_randomiser=None, can_decode=True, key_id=None)
        return replace(unkeyed, sigma=identity.astype(np.int32), inverse=identity)

    def scramble(self, ids: NDArray[np.int64]) -> Ids:
        """Returns (t,) the scrambled ids of one text's original ids (t,). Where a token has several, one is drawn."""
        scrambled_ids = (
            self.sigma.take(ids) if self.alias_choices is None else self.alias_choices.pick(ids, self.new_stream())
        )
        return scrambled_ids if self.id_randomiser is None else self.id_randomiser.randomise(ids, scrambled_ids)

    def scramble_lists(self, lists: Sequence[Sequence[int]]) -> list[Ids]:
        """Returns the scrambled ids of each text's original ids. Raises IdOutOfRange for an id that no row has."""
        bounds = [0, *accumulate(map(len, lists))]
        flat = np.fromiter(chain.from_iterable(lists), np.int64, bounds[-1])
        if flat.size and int(flat.max()) >= len(self.sigma):
            raise IdOutOfRange(
                f"the tokenizer gives id {flat.max()}, the model's table ends at {len(self.sigma) - 1}",
                "resize the model's embeddings to its tokenizer, then scramble it again",
            )
        if self.id_randomiser is not None:
            return [self.scramble(flat[start:end]) for start, end in pairwise(bounds)]
        ids = self.scramble(flat)
        return [ids[start:end] for start, end in pairwise(bounds)]

    # --- ids to text --------------------------------------------------------------------------------------------------
    def decode(self, ids: Sequence[int] | NDArray[Any], skip_special: bool = True) -> str:
        """Returns the text of scrambled ids (t,).

        Ids of padding rows, which a model can emit, have no text (`count_unknown`).

        Args:
            skip_special: whether special tokens have no text.

        Raises:
            IdOutOfRange: an id is not of this model.
            CodecError: under this key an id names no token.
        """
        return self._decode_original(self._shown_ids(ids, self.is_visible if skip_special else self.is_token))

    def decode_batch(self, batch: Iterable[Sequence[int] | NDArray[Any]]) -> list[str]:
        """Returns the text of each row of ids, without special tokens. See `decode`."""
        rows = [_id_array(ids) for ids in batch]
        original = self._unscramble(np.concatenate([np.empty(0, np.int64), *rows]))
        is_shown = self.is_visible[original]
        bounds = np.concatenate([[0], np.cumsum(is_shown)])[np.cumsum([0, *map(len, rows)])].tolist()
        visible_ids = original[is_shown].tolist()
        return [self._decode_original(visible_ids[begin:end]) for begin, end in pairwise(bounds)]

    def count_unknown(self, ids: Sequence[int] | NDArray[Any]) -> int:
        """Returns how many scrambled ids (t,) have no token in the tokenizer. Raises what `decode` raises."""
        return int((~self.is_token[self._unscramble(ids)]).sum())

    def stream_decoder(self, shown_tokens: Sequence[str] = ()) -> StreamDecoder:
        """Returns a decoder for scrambled ids that arrive a few at a time.

        Args:
            shown_tokens: special tokens whose text is shown too. The text of others is left out.
        """
        is_shown = self.is_visible
        added_tokens = self.tokenizer.added_tokens_encoder
        if added_ids := [added_tokens[token] for token in shown_tokens if token in added_tokens]:
            is_shown = is_shown.copy()
            is_shown[added_ids] = True
        return StreamDecoder(
            partial(self._shown_ids, is_shown=is_shown), self._decode_original, decodes_by_byte(self.tokenizer)
        )

    @property
    def stop_ids(self) -> Ids:
        """Returns the scrambled end-of-sequence id as an array of one, or of none if the tokenizer has none."""
        end = self.tokenizer.eos_token_id
        return self.sigma[[] if end is None else [end]]

    @property
    def has_chat_template(self) -> bool:
        """Returns whether the model's tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def supports_tools(self) -> bool:
        """Returns whether the chat template reads `tools`."""
        return supports_tools(self.tokenizer)

    @property
    def template_option_names(self) -> frozenset[str]:
        """Returns the names of options that the chat template reads, such as `enable_thinking`."""
        return template_option_names(self.tokenizer)

    # --- internals ----------------------------------------------------------------------------------------------------
    def _limit(self, max_length: int | None, added_tokens: int = 0, min_tokens: int = 1) -> int:
        """Returns the most tokens of a text.

        Args:
            max_length: the most tokens that the caller asks for. None: as many as the model takes.
            added_tokens: the number of tokens that are added to the text.
            min_tokens: the number of the text's own tokens that must fit.

        Raises:
            UsageError: the added tokens and `min_tokens` others do not fit.
        """
        limit = self.max_tokens if max_length is None else min(self.max_tokens, max_length)
        if limit < added_tokens + min_tokens:
            requested = limit if max_length is None else max_length
            raise UsageError(
                f"the length limit is {requested}, at least {added_tokens + min_tokens} is needed",
                f"the tokenizer adds {added_tokens} special token{'s' if added_tokens > 1 else ''} to each text"
                if added_tokens
                else "",
            )
        return limit

    def _require_max_length(self, lengths: NDArray[np.int64], limit: int) -> None:
        """Raises TooLong for the first text that is longer than the limit. `lengths` (texts,) counts tokens."""
        if (lengths > limit).any():
            index = int((lengths > limit).argmax())
            fault = f"is {lengths[index]} tokens long, at most {limit} fit"
            error = TooLong.of(index, fault, "shorten it, or have it cut: --truncate (in Python: truncate=True)")
            error.token_count = int(lengths[index])
            raise error

    def _unscramble(self, ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        """Returns (t,) the original ids. Raises IdOutOfRange, and CodecError under a key whose ids name no token."""
        if not self.can_decode:
            raise CodecError(
                "under this key an id names a cluster of tokens and no token: it cannot be read back",
                "keep the text itself; a key without rows=shared or a coarse vocabulary has ids that can be read",
            )
        array = _id_array(ids)
        if array.size and (int(array.min()) < 0 or int(array.max()) >= len(self.inverse)):
            raise IdOutOfRange(
                f"an id is outside 0 to {len(self.inverse) - 1}", "these ids are of another model: check the key"
            )
        return self.inverse.take(array)

    def _shown_ids(self, ids: Sequence[int] | NDArray[Any], is_shown: NDArray[np.bool_]) -> list[int]:
        """Returns the original ids of scrambled ones, without those for which `is_shown` (n,) is false."""
        # Most chunks of an answer are one token, for which arrays cost more than the rest
        if self.can_decode and len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < len(self.inverse):
            token = int(self.inverse[ids[0]])
            return [token] if is_shown[token] else []
        original = self._unscramble(ids)
        return original[is_shown[original]].tolist()

    def _decode_original(self, original: list[int]) -> str:
        """Returns the text of original ids. Texts of single tokens, which streams ask for all the time, are kept."""
        if len(original) == 1 and (cached_text := self._token_texts.get(original[0])) is not None:
            return cached_text
        # No clean-up after the fact: it would change text that a stream has already shown.
        text = self.tokenizer.decode(original, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if len(original) == 1:
            self._token_texts[original[0]] = text
        return text


def codec_of(unlocked: UnlockedKey, model: str | None = None) -> Codec:
    """Returns the codec of a key file, with the tokenizer of its model, or of `model` if the original moved there."""
    return Codec.open(unlocked.key, resolve_model(model or unlocked.key.info.model, uses_weights=False))


def _id_array(ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Returns ids (t,) as an array. Raises CodecError if they are not one list of whole numbers."""
    id_array = np.asarray(ids)
    if id_array.size == 0:
        return np.empty(0, np.int64)
    if id_array.ndim != 1 or id_array.dtype.kind not in "iu":
        raise CodecError("ids must be one list of whole numbers", "give for example [5, 17, 2]")
    return id_array.astype(np.int64, copy=False)
