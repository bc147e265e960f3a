"""`python -m milkglass.models.template_worker`: renders chat templates for another process, until its input closes.

A chat template is a program that came with a model. It runs here, without the key, the passphrase or the network's
secrets of the process that asks, and with a bound on memory. The deadline is that process's: it ends this one
(chat_template.py). Each request and each answer is one line of JSON; an empty answer comes first.
"""

from __future__ import annotations

import json
import os
import resource
from typing import Any

from milkglass.system import close_memory

MEMORY = 1 << 29  # bytes that rendering may add to what the process has when it has loaded its modules


def main() -> None:
    reading, writing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    close_memory()  # it is given texts
    bound = _address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    writing.write(b"{}\n")  # ready: from now on each answer has the deadline of one conversation
    writing.flush()
    while line := reading.readline():
        request = json.loads(line)
        try:
            if request["call"] == "names":
                answer: dict[str, Any] = {"names": _names(request["template"])}
            else:
                texts, _ = render_jinja_template(
                    conversations=[request["messages"]],
                    tools=request["tools"],
                    chat_template=request["template"],
                    add_generation_prompt=request["add_generation_prompt"],
                    **request["options"],
                )
                answer = {"text": texts[0]}
            written = json.dumps(answer).encode() + b"\n"
        except MemoryError:
            written = b'{"fault": "memory"}\n'
        except jinja2.TemplateError:
            written = b'{"fault": "refused"}\n'
        except Exception:  # noqa: BLE001  (whatever a template does is its own fault, and its words may quote a message)
            written = b'{"fault": "failed"}\n'
        writing.write(written)
        writing.flush()


def _names(template: str) -> list[str]:
    """The variables that a template reads and does not set."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment
    return sorted(meta.find_undeclared_variables(environment.parse(template)))


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  (pathlib is not loaded here)
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
