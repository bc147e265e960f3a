"""Reads all defences as a recipe writes them: {} is no defence, else the entry names its kind and parameters.

    k = 10, epsilon = 0.1                                      a scheme that rewrites tables; `scheme` if not ObfusLM
    k = 10, epsilon = 0.1, bands = 2.0                         the same in frequency bands, counted on the corpus
    sanitizer = "custext+", epsilon = 3, words = "glove.txt"   words replaced before they are sent
    sanitizer = "rnm", epsilon = 3, by = "tokens"              ids replaced before they are sent; RNM's default
    masked = true                                              names and the like masked by Presidio before text is sent
    encoder = "dp-forward", epsilon = 8                        a model cut in two, hidden states disturbed
    defence = "reversed"                                       a whole defence that an installed package brings

Importing this module imports every defence. Commands import it only when they need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milkglass.catalogue import Catalogue
from milkglass.defences.masked_text import MaskedText
from milkglass.defences.obfuscated_tables import Plain, TableDefence
from milkglass.defences.sanitized_text import SanitizerDefence
from milkglass.defences.undisturbed import Undisturbed
from milkglass.errors import UsageError
from milkglass.hidden_states.catalogue import HIDDEN_STATE_DEFENCES
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.parameters import with_values
from milkglass.sanitizers.catalogue import SANITIZERS
from milkglass.schemes.catalogue import scheme_of_recipe
from milkglass.threat.defence import Defence

CONTROLS: Catalogue[HiddenStateDefence] = Catalogue("control", Undisturbed())  # nothing is protected
INSTALLED_DEFENCES: Catalogue[Defence] = Catalogue("defence", group="milkglass.defence", kind=Defence)


def installed_defence_of(name: str, parameters: Mapping[str, Any]) -> Defence:
    """Returns a defence that an installed package brings.

    Raises:
        UsageError: there is none of that name, it is a defence of hidden states, or a parameter is wrong.
    """
    defence = INSTALLED_DEFENCES.make(name, parameters)
    if isinstance(defence, HiddenStateDefence):
        raise UsageError(f"{name} is a defence of hidden states", f'write encoder = "{name}"')
    return defence


def hidden_state_defence_of(name: str, parameters: Mapping[str, Any]) -> HiddenStateDefence:
    """Returns a defence of hidden states, or a control, which protects nothing.

    Raises:
        UsageError: there is none of that name, or a parameter is wrong.
    """
    return (CONTROLS if name in CONTROLS else HIDDEN_STATE_DEFENCES).make(name, parameters)


def defence_of(entry: Mapping[str, Any], data: Path | None = None) -> Defence:
    """Returns the defence that a recipe's entry names (see the module).

    Args:
        entry: the kind and the parameters.
        data: the folder in which file names of the entry start. None: the working folder.

    Raises:
        UsageError: the entry names no defence, or a parameter is wrong.
    """
    parameters = dict(entry)
    if not parameters:
        return Plain()
    if "encoder" in parameters:
        return hidden_state_defence_of(parameters.pop("encoder"), parameters)
    if "defence" in parameters:
        return installed_defence_of(parameters.pop("defence"), parameters)
    if "sanitizer" in parameters:
        return _sanitizer(parameters.pop("sanitizer"), parameters, data)
    if "masked" in parameters:
        if parameters.pop("masked") is not True:
            raise UsageError("masked is not true", "write masked = true, or leave it out")
        return with_values(MaskedText, parameters, "masked")  # type: ignore[no-any-return]
    bands = parameters.pop("bands", None)  # here the factor alone: they are counted on the corpus
    return TableDefence(scheme_of_recipe(parameters), None if bands is None else float(bands))


def _sanitizer(name: str, parameters: dict[str, Any], data: Path | None) -> Defence:
    """Returns the sanitizer of a recipe's entry.

    Raises:
        UsageError: there is no such sanitizer, a parameter is wrong, or the file of words does not exist.
    """
    words = parameters.pop("words", None)
    path = None if words is None else (data or Path()) / str(words)
    if path is not None and not path.is_file():
        raise UsageError(f"there is no {path}", "words names a GloVe file, from the data folder on")
    return sanitizer_of(name, parameters, path)


def sanitizer_of(name: str, entry: Mapping[str, Any], words: Path | None) -> SanitizerDefence:
    """Returns a sanitizer as a defence.

    Args:
        name: the sanitizer's name.
        entry: its parameters, and "by": what is replaced, "words" or "tokens". Without "by", tokens are replaced if the
            sanitizer's paper does so and `words` is None; otherwise words.
        words: a GloVe file. None: none is given.

    Raises:
        UsageError: there is no such sanitizer, or a parameter is wrong.
    """
    parameters = dict(entry)
    by = parameters.pop("by", None)
    sanitizer = SANITIZERS.make(name, parameters)
    if by is None:
        by = "tokens" if sanitizer.by_tokens and words is None else "words"
    return SanitizerDefence(sanitizer, words, by)
