"""Lists all defences of hidden states by name.

To add one, write a file and add a line here; the shared tests then run on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from milkglass.catalogue import Catalogue
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.hidden_states.cape import CAPE
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.dp_forward import DPForward
from milkglass.hidden_states.gelo import GELO
from milkglass.hidden_states.textmixer import TextMixer
from milkglass.hidden_states.textobfuscator import TextObfuscator
from milkglass.parameters import parameters_of, read_words

HIDDEN_STATE_DEFENCES: Catalogue[HiddenStateDefence] = Catalogue(
    "hidden-state defence",
    DPForward(),
    CAPE(),
    TextObfuscator(),
    GELO(),
    TextMixer(),
    group="milkglass.defence",
    kind=HiddenStateDefence,
)
TRAINING = "training"  # a parameter of every method, whose values commands and files keep apart from the others


def parse_defence(method: str, words: Sequence[str], training: Mapping[str, Any]) -> HiddenStateDefence:
    """Returns the method with `words` such as "epsilon=8" and these fields of its training. Raises UsageError."""
    parameters = read_words(type(HIDDEN_STATE_DEFENCES[method]), words, method, without=(TRAINING,))
    return HIDDEN_STATE_DEFENCES.make(method, {**parameters, TRAINING: training})


def parameter_values(defence: HiddenStateDefence) -> dict[str, Any]:
    """Returns the parameters without those of the training, as JSON."""
    return {name: getattr(defence, name) for name in parameters_of(type(defence)) if name != TRAINING}


def restore_defence(
    method: str, parameters: Mapping[str, Any], training: Mapping[str, Any] | None = None
) -> HiddenStateDefence:
    """Returns the defence of these `parameter_values` and, for a client half, training. Raises CorruptCheckpoint."""
    try:
        return HIDDEN_STATE_DEFENCES.make(method, {**parameters, **({} if training is None else {TRAINING: training})})
    except UsageError as error:
        raise CorruptCheckpoint(
            f"the folder of this half names a method or a parameter that does not exist here: {error.message}",
            "open it with the version of milkglass that wrote it",
        ) from error
