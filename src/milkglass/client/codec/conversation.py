"""Conversations in a model's own chat template, and what must not be in them.

Out of scope: sigma, and what becomes of the text. Nothing that is raised here quotes a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from milkglass.errors import CodecError, EmptyText, NoChatTemplate, UsageError

Message = Mapping[str, Any]  # role and content; of tool calls, what OpenAI's messages have beside them
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")  # of a message: what a template may see


def require_text(texts: Sequence[str], empty_is_fine: bool = False) -> None:
    """Raises UsageError for a single text, which would be a list of letters, and EmptyText or CodecError for a text
    that cannot be encoded."""
    if isinstance(texts, str | bytes):
        raise UsageError("a list of texts is needed, this is one text", "give [text]")
    for number, text in enumerate(texts):
        if not text and not empty_is_fine:
            raise EmptyText.of(number, "is empty", "leave empty texts out")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CodecError.of(number, "holds half a surrogate pair", "save it as proper UTF-8") from None


def require_ordinary(
    tokenizer: Any, conversations: Sequence[Sequence[Message]], tools: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Raises CodecError for messages or tools that hold the text of a special token, such as the end of a turn:
    templates are text, so the tokenizer could not tell it from the template's own."""
    places, words = [], []
    for number, messages in enumerate(conversations):
        _require_messages(tokenizer, messages)
        for turn, message in enumerate(messages):
            inside = [*_texts(dict(message))]
            places += [(number, f"its message {turn + 1}")] * len(inside)
            words += inside
    described = [*_texts(list(tools))]
    places += [(0, "its tools")] * len(described)
    words += described
    if not words or not _may_hold_special(tokenizer, words):
        return
    obeyed, literal = (
        tokenizer(
            words, add_special_tokens=False, padding=False, truncation=False, verbose=False, split_special_tokens=one
        )["input_ids"]
        for one in (False, True)
    )
    for (number, where), one, other in zip(places, obeyed, literal, strict=True):
        if one != other:
            fault = f"holds the text of a special token in {where}"
            raise CodecError.of(number, fault, "leave it out: the model would obey it", "conversation")


def _require_messages(tokenizer: Any, messages: Sequence[Message]) -> None:
    if not tokenizer.chat_template:
        raise NoChatTemplate("this model's tokenizer has no chat template", "encode plain text instead")
    if not messages:
        raise EmptyText("the conversation has no message", "give at least one")
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise CodecError(f"message {number} has no role or no content", 'give {"role": ..., "content": ...}')
    require_text([message["content"] for message in messages], empty_is_fine=True)
    require_text([message["role"] for message in messages], empty_is_fine=True)


def _may_hold_special(tokenizer: Any, words: Sequence[str]) -> bool:
    """False only where no special token can be found in the words: then they need not be tokenized to look. A token
    that is matched in normalised text may be there in other letters."""
    known = _SPECIAL.get(tokenizer)
    if known is None:
        special = [one for one in tokenizer.added_tokens_decoder.values() if one.special]
        literal = "|".join(re.escape(one.content) for one in special)
        known = _SPECIAL[tokenizer] = None if any(one.normalized for one in special) else re.compile(literal or r"(?!)")
    return known is None or any(map(known.search, words))


_SPECIAL: WeakKeyDictionary[Any, re.Pattern[str] | None] = WeakKeyDictionary()  # None: only tokenizing tells


def _texts(value: Any) -> Iterator[str]:
    """All strings in JSON-like data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def takes_tools(tokenizer: Any) -> bool:
    """Whether the chat template has a place for tools. Others would leave them out without a word."""
    return re.search(r"\btools\b", str(tokenizer.chat_template or "")) is not None


def render(
    tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """`messages` and `tools` were checked; the template sees nothing of them but what was."""
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            [{name: one[name] for name in FIELDS if name in one} for one in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except (jinja2.TemplateError, TypeError, KeyError, IndexError):
        # Its own message may quote the conversation, so it is not passed on.
        raise CodecError(
            f"the model's chat template refuses this conversation of {len(messages)} messages",
            "most want a user's message first, and then roles that alternate",
        ) from None


def answers(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
    """The whole conversation's text, and where (start, stop) the assistant's turns lie in it."""
    text = render(tokenizer, messages, add_generation_prompt=False)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and number > 0:
            before = render(tokenizer, messages[:number], add_generation_prompt=True)
            until = render(tokenizer, messages[: number + 1], add_generation_prompt=False)
            if not (until.startswith(before) and text.startswith(until)):
                raise CodecError(
                    f"the chat template rewrites earlier turns: the answer in message {number + 1} can't be told apart",
                    "make one example of each answer",
                )
            spans.append((len(before), len(until.rstrip())))  # what follows the end token is not the answer's
    if not spans:
        raise CodecError("the conversation has no answer to learn", 'end it with {"role": "assistant", ...}')
    return text, spans
