"""`POST /v1/responses`, in OpenAI's format. No conversation is stored: each request has all of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from milkglass.errors import UsageError
from milkglass.proxy.backend import Backend
from milkglass.proxy.bodies import ResponseBody
from milkglass.proxy.completions import logprob_documents
from milkglass.proxy.reply import Piece, Reply, TokenLogprobs, gather_pieces, merge_pieces
from milkglass.proxy.text.calls import ToolCall, demanded_tool
from milkglass.rows.messages import normalize_messages, tools_of
from milkglass.server.random_ids import new_id

MODEL_ITEM_TYPES = ("reasoning",)  # items of earlier answers that templates do not take
ITEM_FIELDS = ("type", "id", "status", "phase")  # fields of a message item that a chat's message does not have


def messages_of(body: ResponseBody) -> list[dict[str, Any]]:
    """Returns the input's items as messages of a chat. Raises UsageError for an unknown kind of item."""
    start = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*start, {"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = list(start)
    for number, item in enumerate(body.input, 1):
        item_type = item.get("type", "message")
        if item_type == "message":
            messages.append({name: value for name, value in item.items() if name not in ITEM_FIELDS})
        elif item_type == "function_call":
            _add_call(messages, item)
        elif item_type == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))})
        elif item_type not in MODEL_ITEM_TYPES:
            raise UsageError(f"input {number} is of a kind that is not offered", "give messages and function calls")
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Adds a call. It joins the message of preceding calls, and of what the model said before them."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


class ResponseExchange:
    """Answers one request to /v1/responses.

    Constructing it encodes the request, and raises CodecError or UsageError before anything is sent.
    """

    def __init__(self, backend: Backend, body: ResponseBody) -> None:
        if body.n not in (None, 1) or body.stops:
            raise UsageError("this call gives one answer, and takes no stop strings", "use /v1/chat/completions")
        tools = [] if body.tool_choice == "none" else tools_of(body.tools)
        names = frozenset(tool["function"]["name"] for tool in tools)
        request = backend.chat_request(
            body.model, normalize_messages(messages_of(body)), tools, demanded_tool(body.tool_choice, names),
            template_fields=body.template_fields(), max_tokens=body.max_output_tokens, logit_bias=body.logit_bias,
            logprobs=body.top_logprobs, at_most_one_call=body.parallel_tool_calls is False, **body.sampling(),
        )  # fmt: skip
        self._prompt_tokens = len(request.ids_request.prompt)
        self._start_replies: Callable[[], Reply] = lambda: backend.replies(request)[0]
        self._head = {
            "id": new_id("resp"), "object": "response", "created_at": int(time.time()), "model": request.model,
            "error": None, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature, "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "previous_response_id": None,
            "store": False, "text": {"format": {"type": "text"}}, "truncation": "disabled",
        }  # fmt: skip

    async def response(self) -> dict[str, Any]:
        """Returns the whole answer. Raises what `Reply.pieces` raises."""
        items, reply = _Items(), self._start_replies()
        for piece in (await gather_pieces([reply]))[0]:
            items.take(piece)
        return self._document(reply, items.finish())

    def _document(self, reply: Reply, output: Sequence[Mapping[str, Any]], status: str | None = None) -> dict[str, Any]:
        is_cut = reply.finish_reason == "length" and status is None
        status = status or ("incomplete" if is_cut else "completed")
        usage = None
        if status != "in_progress":
            usage = {
                "input_tokens": self._prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": reply.token_count, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._prompt_tokens + reply.token_count,
            }  # fmt: skip
        reason = {"reason": "max_output_tokens"} if is_cut else None
        return {**self._head, "status": status, "incomplete_details": reason, "output": list(output), "usage": usage}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the events of a streamed answer with their `type` and `sequence_number`."""
        sequence_number = 0
        async with aclosing(self._events()) as events:
            async for event in events:
                yield {**event, "sequence_number": sequence_number}
                sequence_number += 1

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        items, reply = _Items(), self._start_replies()
        opening = [
            {"type": f"response.{status}", "response": self._document(reply, [], "in_progress")}
            for status in ("created", "in_progress")
        ]
        async with aclosing(merge_pieces([reply])) as pieces:
            async for _, piece in pieces:
                for event in (*opening, *(items.take(piece) if piece is not None else ())):
                    yield event
                opening = []
        for event in items.close():
            yield event
        document = self._document(reply, items.finish())
        yield {"type": f"response.{document['status']}", "response": document}


@dataclass
class _Items:
    """Collects the items of the output.

    Attributes:
        done_items: the complete items, in order.
        open_item: the item that is being written; None: there is none.
    """

    done_items: list[dict[str, Any]] = field(default_factory=list)
    open_item: dict[str, Any] | None = None
    _text: str = ""
    _logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """Adds a piece, and returns its events."""
        events: list[dict[str, Any]] = []
        if piece.text:
            item_type = "reasoning" if piece.kind == "reasoning" else "message"
            if self.open_item is None or self.open_item["type"] != item_type:
                events += self.close() + self._opening_events(item_type)
            self._text += piece.text
            self._logprobs += piece.logprobs
            events.append(self._delta(piece))
        for call in piece.calls:
            events += self.close() + self._call(call)
        return events

    def finish(self) -> list[dict[str, Any]]:
        """Ends the open item, and returns all items."""
        self.close()
        return self.done_items

    def close(self) -> list[dict[str, Any]]:
        """Ends the open item, and returns its events."""
        item, index = self.open_item, len(self.done_items)
        if item is None:
            return []
        part = self._part(item["type"], self._text)
        item |= {"status": "completed", "content": [part]}
        self.done_items.append(item)
        self.open_item, text, self._text, self._logprobs = None, self._text, "", []
        position = {"item_id": item["id"], "output_index": index, "content_index": 0}
        part_type = "output_text" if item["type"] == "message" else "reasoning_text"
        logprobs = {"logprobs": part["logprobs"]} if part_type == "output_text" else {}
        return [
            {"type": f"response.{part_type}.done", **position, "text": text, **logprobs},
            {"type": "response.content_part.done", **position, "part": part},
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]

    def _opening_events(self, item_type: str) -> list[dict[str, Any]]:
        fields: dict[str, Any] = {"role": "assistant"} if item_type == "message" else {"summary": []}
        item = {"id": new_id("msg"), "type": item_type, "status": "in_progress", "content": [], **fields}
        self.open_item, index = dict(item), len(self.done_items)
        position = {"item_id": item["id"], "output_index": index, "content_index": 0}
        return [
            {"type": "response.output_item.added", "output_index": index, "item": item},
            {"type": "response.content_part.added", **position, "part": self._part(item_type, "")},
        ]

    def _part(self, item_type: str, text: str) -> dict[str, Any]:
        if item_type != "message":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprob_documents(self._logprobs)}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        assert self.open_item is not None
        position = {"item_id": self.open_item["id"], "output_index": len(self.done_items), "content_index": 0}
        part_type = "reasoning_text" if piece.kind == "reasoning" else "output_text"
        logprobs: dict[str, Any] = {"logprobs": logprob_documents(piece.logprobs)} if part_type == "output_text" else {}
        return {"type": f"response.{part_type}.delta", **position, "delta": piece.text, **logprobs}

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        index, item_id = len(self.done_items), new_id("fc")
        item = {"id": item_id, "type": "function_call", "call_id": call.id, "name": call.name,
                "arguments": call.arguments}  # fmt: skip
        self.done_items.append({**item, "status": "completed"})
        position = {"item_id": item_id, "output_index": index}
        done_fields = {"arguments": call.arguments, "name": call.name}
        started = {**item, "arguments": "", "status": "in_progress"}
        return [
            {"type": "response.output_item.added", "output_index": index, "item": started},
            {"type": "response.function_call_arguments.delta", **position, "delta": call.arguments},
            {"type": "response.function_call_arguments.done", **position, **done_fields},
            {"type": "response.output_item.done", "output_index": index, "item": self.done_items[-1]},
        ]
