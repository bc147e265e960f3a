"""Defines what a codec returns: scrambled ids, and labels on the tokens of the assistant's turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.client.codec.conversation import (
    RenderedChat,
    SupervisedExample,
    require_messages,
    supports_tools,
    training_examples,
)
from milkglass.errors import CodecError, TooLong
from milkglass.models.pieces import Offsets
from milkglass.rows.messages import Message

IGNORED_LABEL = -100  # a label on which there is no loss
Ids = NDArray[np.int32]
Tool = Mapping[str, Any]


@dataclass(frozen=True)
class Encoded:
    """Holds the scrambled ids of texts.

    Attributes:
        ids: one int32 array (t,) for each text.
        token_type_ids: int8 arrays of the same shapes, if the model uses them.
        cut_indices: the indices of the texts that were cut to the limit, in ascending order.
    """

    ids: list[Ids]
    token_type_ids: list[NDArray[np.int8]] | None
    cut_indices: tuple[int, ...] = ()


@dataclass(frozen=True)
class LabelledIds:
    """Holds training examples: scrambled ids, and labels that are -100 outside the answers.

    A text or conversation makes one example, several if its template requires that (`training_examples`), or none if
    the limit cuts off all of its answers.

    Attributes:
        ids: one int32 array (t,) for each example.
        labels: int32 arrays of the same shapes.
        source_indices: the index of each example's text or conversation.
        cut_indices: the indices of the texts or conversations that were cut to the limit.
        lost_answer_starts: for the index of each conversation without an answer within the limit, the number of tokens
            before its first answer.
    """

    ids: list[Ids]
    labels: list[Ids]
    source_indices: tuple[int, ...]
    cut_indices: tuple[int, ...] = ()
    lost_answer_starts: Mapping[int, int] = field(default_factory=dict)


def encode_conversations(
    tokenizer: Any,
    conversations: Sequence[Sequence[Message]],
    limit: int,
    scramble: Callable[[Sequence[Sequence[int]]], list[Ids]],
    tools: Sequence[Sequence[Tool]] = (),
) -> tuple[LabelledIds, NDArray[np.int64]]:
    """Encodes the examples of each conversation, cut to `limit` tokens.

    Args:
        tokenizer: the model's tokenizer.
        conversations: the messages of each conversation.
        limit: the most tokens of an example.
        scramble: returns the scrambled ids of each list of original ids.
        tools: for each conversation the functions that the template shows to the model. Empty: there are none.

    Returns:
        The examples, and (conversations,) the number of tokens, before cutting, of the longest example of each.

    Raises:
        CodecError: a conversation cannot be rendered, or has no answer. The message has its number.
    """
    examples, source_indices = list[SupervisedExample](), list[int]()
    for index, messages in enumerate(conversations):
        require_messages(tokenizer, messages)
        try:
            if tools and tools[index] and not supports_tools(tokenizer):
                raise CodecError(
                    "the chat template has no place for tools", "leave tools out, or use a template with one"
                )
            supervised_examples = training_examples(tokenizer, messages, tools[index] if tools else ())
        except CodecError as error:
            raise type(error).of(index, f"cannot be trained on: {error.message}", error.hint, "conversation") from None
        examples += supervised_examples
        source_indices += [index] * len(supervised_examples)
    tokens = _original_ids_and_offsets(tokenizer, [example.rendered for example in examples])
    lengths, answer_starts = np.zeros(len(conversations), np.int64), dict[int, int]()
    labelled_ids = LabelledIds([], [], ())
    kept_source_indices = list[int]()
    for index, example, (public_ids, offsets), ids in zip(
        source_indices, examples, tokens, scramble([public_ids for public_ids, _ in tokens]), strict=True
    ):
        lengths[index] = max(lengths[index], len(public_ids))
        is_answer = _starts_within(offsets, example.answer_spans)
        if is_answer[:limit].any():
            kept_ids = ids[:limit]
            labelled_ids.ids.append(kept_ids)
            labelled_ids.labels.append(np.where(is_answer[:limit], kept_ids, np.int32(IGNORED_LABEL)).astype(np.int32))
            kept_source_indices.append(index)
        else:
            answer_starts.setdefault(index, int(is_answer.argmax()))
    lost_answer_starts = {index: count for index, count in answer_starts.items() if index not in kept_source_indices}
    cut_indices = tuple(np.flatnonzero(lengths > limit).tolist())
    return replace(
        labelled_ids,
        source_indices=tuple(kept_source_indices),
        cut_indices=cut_indices,
        lost_answer_starts=lost_answer_starts,
    ), lengths


def _original_ids_and_offsets(tokenizer: Any, rendered: Sequence[RenderedChat]) -> list[tuple[list[int], Offsets]]:
    """Returns the original ids and the offsets of each rendered conversation.

    Texts of a single piece are tokenized together, which is faster.
    """
    separate_results = [None if len(prompt.pieces) == 1 else prompt.tokenize(tokenizer) for prompt in rendered]
    texts = [prompt.text for prompt, result in zip(rendered, separate_results, strict=True) if result is None]
    if texts:
        batch = tokenizer(texts, add_special_tokens=False, truncation=False, return_offsets_mapping=True)
        batch_rows = zip(batch["input_ids"], batch["offset_mapping"], strict=True)
        return [next(batch_rows) if tokens is None else tokens for tokens in separate_results]
    return [tokens for tokens in separate_results if tokens is not None]


def answerless_error(
    tokenizer: Any, messages: Sequence[Message], index: int, length: int, labelled: LabelledIds, limit: int
) -> TooLong:
    """Returns the error for a conversation without an answer within the limit.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation.
        index: the conversation's index in `labelled`.
        length: the number of the conversation's tokens.
        labelled: the encoded conversations.
        limit: the most tokens of an example.
    """
    contents = tokenizer([message["content"] for message in messages], add_special_tokens=False)
    template_tokens, answer_start = length - sum(map(len, contents["input_ids"])), labelled.lost_answer_starts[index]
    return TooLong.of(
        index,
        f"has no answer within {limit} tokens: its answer begins after {answer_start}, and the chat template itself "
        f"adds {max(0, template_tokens)} of all {length}",
        f"set --max-length to more than {answer_start}, or shorten what comes before the answer",
        "conversation",
    )


def _starts_within(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Returns (t,) whether each token starts within one of the spans of characters."""
    starts = np.asarray(offsets, np.int64).reshape(-1, 2)[:, 0]
    is_within = np.zeros(len(starts), np.bool_)
    for start, stop in spans:
        is_within |= (starts >= start) & (starts < stop)
    return is_within
