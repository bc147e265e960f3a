"""Renders conversations in a model's own chat template, and tokenizes them.

The text of a special token in a message stays text: only the template's own special tokens take effect. No error
quotes a conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from milkglass.client.codec.kept_ids import ANSWER_IDS, KeptIds, RewrittenText
from milkglass.errors import CodecError, EmptyText, NoChatTemplate, UsageError
from milkglass.models import chat_template
from milkglass.models.pieces import Offsets, TextPiece, tokenize_all
from milkglass.rows.messages import Message

# Fields of a message that a template may see
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
Span = tuple[int, int]  # (start, stop) in characters
DecodeIds = Callable[[Sequence[int]], str]  # decodes the ids of an answer
PRIVATE_USE = range(0xF0000, 0xFFFFE)  # characters that texts rarely use; unused ones serve as marks


def as_text_list(texts: Iterable[str]) -> list[str]:
    """Returns texts as a list. Raises UsageError for a single text, which would be read as a list of characters."""
    if isinstance(texts, str | bytes):
        raise UsageError("a list of texts is needed, this is one text", "give [text]")
    return list(texts)


def require_encodable(texts: Sequence[str], allows_empty: bool = False) -> None:
    """Refuses texts that cannot be encoded.

    Raises:
        UsageError: a single text was given, which would be read as a list of characters.
        EmptyText: a text is empty.
        CodecError: a text is no string, or is not valid Unicode.
    """
    for index, text in enumerate(as_text_list(texts)):
        if not text and not allows_empty:
            raise EmptyText.of(index, "is empty", "leave empty texts out")
        if not isinstance(text, str):
            raise CodecError.of(index, f"is not a text but of the type {type(text).__name__}", "give strings")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CodecError.of(index, "holds half a surrogate pair", "save it as proper UTF-8") from None


def require_messages(tokenizer: Any, messages: Sequence[Message]) -> None:
    """Raises NoChatTemplate for a model without a template; EmptyText or CodecError for an invalid conversation."""
    if not tokenizer.chat_template:
        raise NoChatTemplate("this model's tokenizer has no chat template", "encode plain text instead")
    if not messages:
        raise EmptyText("the conversation has no message", "give at least one")
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise CodecError(f"message {number} has no role or no content", 'give {"role": ..., "content": ...}')
    require_encodable([message["content"] for message in messages], allows_empty=True)
    require_encodable([message["role"] for message in messages], allows_empty=True)


@dataclass(frozen=True)
class RenderedChat:
    """Holds a conversation or prompt as the template writes it.

    Attributes:
        pieces: the parts of the text. In a literal part, the text of a special token is text.
        kept_ids: the scrambled ids of kept texts. Piece ids -1, -2, ... stand for its first, second, ... entry.
    """

    pieces: tuple[TextPiece, ...] = field(repr=False)
    kept_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def tokenize(self, tokenizer: Any) -> tuple[list[int], Offsets]:
        """Returns the original ids, and each token's (start, stop) in `text`."""
        return tokenize_all(tokenizer, self.pieces)

    def append(self, suffix: str) -> RenderedChat:
        """Returns the conversation followed by `suffix`, in which special tokens take effect."""
        return replace(self, pieces=(*self.pieces, TextPiece(suffix, False))) if suffix else self


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
    decode_answer: DecodeIds | None = None,
) -> RenderedChat:
    """Renders a conversation in the model's chat template.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        messages: checked by `require_messages`. The template sees the fields of MESSAGE_FIELDS.
        add_generation_prompt: whether the template appends the beginning of an answer (as in transformers).
        tools: functions that the template shows to the model.
        options: values of further variables of the template (`template_option_names`).
        decode_answer: decodes scrambled ids. If it is given, what a message repeats of an answer (`ANSWER_IDS`) keeps
            that answer's ids: its piece has the ids -1, -2, ..., by their place in `RenderedChat.kept_ids`.

    Raises:
        CodecError: the template refuses the conversation, leaves out a call of a tool, does not read an option, or
            rewrites the text of a special token in a message.
    """
    options = dict(options or {})
    if options and (unknown_options := sorted(set(options) - template_option_names(tokenizer))):
        raise CodecError(
            f"the model's chat template does not read {', '.join(unknown_options)}",
            f"it reads {', '.join(sorted(template_option_names(tokenizer))) or 'no option'}; leave the others out",
        )
    visible_messages = [{name: message[name] for name in MESSAGE_FIELDS if name in message} for message in messages]
    characters = unused_characters([*_strings_in(visible_messages), *_strings_in(list(tools))])
    marks = next(characters), next(characters)
    kept_ids = None if decode_answer is None else KeptIds(decode_answer, characters)
    if kept_ids is not None:
        answer_ids = [message.get(ANSWER_IDS) for message in messages]
        visible_messages = [
            kept_ids.mark_message(message, ids) if ids else message
            for message, ids in zip(visible_messages, answer_ids, strict=True)
        ]
        kept_ids = kept_ids if kept_ids.kept_by_mark else None
    marked_messages = _mark_special(tokenizer, visible_messages, marks, None if kept_ids is None else kept_ids.pattern)
    marked_tools = _mark_special(tokenizer, list(tools), marks)
    text = chat_template.render(tokenizer, marked_messages, add_generation_prompt, marked_tools, options)
    for number, message in enumerate(marked_messages, 1):
        _require_calls(message, number, text)
    if kept_ids is not None:
        try:
            return split_marked(kept_ids, text, lambda part: _split_at_marks(part, marks))
        except RewrittenText:  # the template takes kept texts apart
            return render(tokenizer, messages, add_generation_prompt, tools, options)
    if marked_messages == visible_messages and marked_tools == list(tools):
        return RenderedChat((TextPiece(text, False),))
    return RenderedChat(tuple(_split_at_marks(text, marks)))


def split_marked(kept_ids: KeptIds, text: str, split_part: Callable[[str], Iterable[TextPiece]]) -> RenderedChat:
    """Splits a marked text into pieces.

    Args:
        split_part: splits a part of the text that has no marks of kept texts into pieces.

    Raises:
        RewrittenText: the template changed a kept text.
    """
    all_pieces, ids = list[TextPiece](), list[int]()
    for part in kept_ids.split(text):
        if isinstance(part, str):
            all_pieces += split_part(part)
        else:
            kept_indices = range(len(ids), len(ids) + len(part.ids))
            all_pieces.append(TextPiece(part.text, True, ids=tuple(-1 - index for index in kept_indices)))
            ids += part.ids
    return RenderedChat(tuple(all_pieces), tuple(ids))


def template_option_names(tokenizer: Any) -> frozenset[str]:
    """Returns the names of options that the model's chat template reads, such as `enable_thinking`."""
    token_variables = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    return chat_template.template_variables(tokenizer) - token_variables - set(tokenizer.special_tokens_map)


def _mark_special(
    tokenizer: Any, json_value: Any, marks: tuple[str, str], exempt: re.Pattern[str] | None = None
) -> Any:
    """Returns JSON-like data with marks around what a tokenizer would read as a special token in its strings.

    Args:
        json_value: a string, or lists and mappings of strings.
        marks: the characters before and after a special token's text.
        exempt: finds parts of strings that stay unchanged. None: there are none.
    """
    if isinstance(json_value, str):
        if exempt is None:
            return _mark_text(tokenizer, json_value, marks)
        parts, last_end = list[str](), 0
        for match in exempt.finditer(json_value):
            parts += [_mark_text(tokenizer, json_value[last_end : match.start()], marks), match[0]]
            last_end = match.end()
        return "".join([*parts, _mark_text(tokenizer, json_value[last_end:], marks)])
    if isinstance(json_value, Mapping):
        return {
            _mark_text(tokenizer, name, marks) if isinstance(name, str) else name: _mark_special(
                tokenizer, element, marks, exempt
            )
            for name, element in json_value.items()
        }
    if isinstance(json_value, list | tuple):
        return [_mark_special(tokenizer, element, marks, exempt) for element in json_value]
    return json_value


def _mark_text(tokenizer: Any, text: str, marks: tuple[str, str]) -> str:
    start, stop = marks
    tokens = _special_tokens(tokenizer)
    text = tokens.literal.sub(lambda match: f"{start}{match[0]}{stop}", text)
    if not tokens.has_normalized or start in text:
        return text
    # A special token that is matched in normalized text may be written in other letters: only the tokenizer can tell.
    obeyed, literal = (
        tokenizer(text, add_special_tokens=False, truncation=False, split_special_tokens=flag)["input_ids"]
        for flag in (False, True)
    )
    return text if obeyed == literal else f"{start}{text}{stop}"


@dataclass(frozen=True)
class _SpecialTokens:
    """Describes what a tokenizer reads as special tokens.

    Attributes:
        literal: finds the texts of special tokens.
        has_normalized: whether the tokenizer also finds some in normalized text.
    """

    literal: re.Pattern[str]
    has_normalized: bool


def _special_tokens(tokenizer: Any) -> _SpecialTokens:
    tokens = _SPECIAL_TOKENS_BY_TOKENIZER.get(tokenizer)
    if tokens is None:
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
        longest_first = sorted((token.content for token in special), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        tokens = _SPECIAL_TOKENS_BY_TOKENIZER[tokenizer] = _SpecialTokens(
            pattern, any(token.normalized for token in special)
        )
    return tokens


_SPECIAL_TOKENS_BY_TOKENIZER: WeakKeyDictionary[Any, _SpecialTokens] = WeakKeyDictionary()


def unused_characters(texts: Sequence[str]) -> Iterator[str]:
    """Yields characters of private use that occur in none of the texts."""
    used = {character for text in texts for character in text if ord(character) >= PRIVATE_USE.start}
    return (chr(number) for number in PRIVATE_USE if chr(number) not in used)


def _split_at_marks(text: str, marks: tuple[str, str]) -> Iterator[TextPiece]:
    """Splits a rendered text at its marks. Raises CodecError if the template separated or changed marks."""
    start, stop = marks
    if any(json.dumps(mark)[1:-1] in text for mark in marks):
        raise _rewritten_error()
    for number, part in enumerate(text.split(start)):
        literal, end, plain = part.partition(stop)
        if not number:
            literal, plain, end = "", part, "" if stop not in part else stop
        if bool(number) != bool(end) or stop in plain:
            raise _rewritten_error()
        if literal:
            yield TextPiece(literal, True)
        if plain:
            yield TextPiece(plain, False)


def _rewritten_error() -> CodecError:
    return CodecError(
        "a message holds the text of a special token, and the model's chat template rewrites that message",
        "leave it out: the model would obey it",
    )


def _strings_in(json_value: Any) -> Iterator[str]:
    """Yields all strings in JSON-like data, keys included."""
    if isinstance(json_value, str):
        yield json_value
    elif isinstance(json_value, Mapping):
        for key, element in json_value.items():
            yield from _strings_in(key)
            yield from _strings_in(element)
    elif isinstance(json_value, list | tuple):
        for element in json_value:
            yield from _strings_in(element)


def supports_tools(tokenizer: Any) -> bool:
    """Returns whether the chat template reads `tools`. Other templates would silently drop them."""
    return re.search(r"\btools\b", str(tokenizer.chat_template or "")) is not None


@dataclass(frozen=True)
class SupervisedExample:
    """Holds one training example: a conversation, or its beginning up to an answer.

    Attributes:
        rendered: the conversation.
        answer_spans: the (start, stop) of each learnt answer in `rendered.text`.
    """

    rendered: RenderedChat
    answer_spans: tuple[Span, ...]


def training_examples(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> list[SupervisedExample]:
    """Returns the training examples of one conversation.

    It is one example that teaches all of the assistant's turns, unless the template writes earlier turns differently
    once there are later ones, for example without their reasoning. Then each answer is an example, with the
    conversation before it as the model is asked.

    Args:
        messages: checked by `require_messages`. An assistant's turn is not learnt if it has `"weight": 0`, or if it is
            the first message.
        tools: functions that the template shows to the model.

    Raises:
        CodecError: there is no answer to learn, or the template writes an answer elsewhere than where it asks for one.
    """
    answer_indices = [
        number
        for number, message in enumerate(messages)
        if number > 0 and message["role"] == "assistant" and message.get("weight") != 0
    ]
    if not answer_indices:
        raise CodecError("the conversation has no answer to learn", 'end it with {"role": "assistant", ...}')
    spans, examples = list[Span](), list[SupervisedExample]()
    full = render(tokenizer, messages, False, tools)
    for number in answer_indices:
        prompt = render(tokenizer, messages[:number], True, tools)
        extended = render(tokenizer, messages[: number + 1], False, tools)
        if not extended.text.startswith(prompt.text):
            raise CodecError(
                f"the chat template does not write the answer in message {number + 1} where it asks for one, so that "
                "it can't be told from the template",
                "use the published template of this model",
            )
        _require_written(messages[number], number, extended.text[len(prompt.text) :])
        spans.append((len(prompt.text), len(extended.text.rstrip())))  # what follows the end token is not the answer's
        examples.append(SupervisedExample(extended, (spans[-1],)))
    if all(full.text.startswith(example.rendered.text) for example in examples):
        return [SupervisedExample(full, tuple(spans))]
    return examples


def _require_calls(message: Message, number: int, text: str) -> None:
    """Raises CodecError if a text lacks the name of a tool that message `number` calls: the template left it out."""
    functions = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    names = [str(function.get("name")) for function in functions if isinstance(function, Mapping)]
    if any(name not in text and json.dumps(name)[1:-1] not in text for name in names):
        raise CodecError(
            f"the chat template leaves out the tool calls of message {number}",
            "use a template that has tool calls, or leave such messages out",
        )


def _require_written(message: Message, number: int, answer: str) -> None:
    """Raises CodecError if the template leaves out a call or the reasoning: something else would be learnt."""
    _require_calls(message, number + 1, answer)
    if str(message.get("reasoning_content") or "").strip() not in answer:
        raise CodecError(
            f"the chat template leaves out the reasoning_content of message {number + 1}",
            "leave that field out, or put it into the content as the model writes it",
        )
