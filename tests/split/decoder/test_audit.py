"""The audit of a split decoder: without the sanitizer the nearest rows are the text; with it the channel is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from milkglass.attacks.hidden_states.near_hidden import NearHidden
from milkglass.attacks.token_ids.channel import ChannelAttack
from milkglass.audit.key_scene import AuditFiles
from milkglass.audit.scene import ALIKE, MODEL_ONLY
from milkglass.enclave import folder as at_rest
from milkglass.enclave.enclave import Enclave
from milkglass.enclave.token_sanitizer import RnmSettings
from milkglass.errors import KeyForOtherModel
from milkglass.models.checkpoint import Checkpoint
from milkglass.split.audit_scene import SplitScene
from milkglass.split.decoder import audit_scene
from milkglass.threat.budget import Budget
from milkglass.threat.observations import Activations, Tokens
from tests import tiny
from tests.split.decoder.kit import Served
from tests.warm import warm_enclaves

__all__ = ["warm_enclaves"]

WORDS = [
    "nurse",
    "called",
    "results",
    "test",
    "monday",
    "move",
    "friday",
    "invoice",
    "scan",
    "wrong",
    "father",
    "fever",
]


@pytest.fixture(scope="module")
def enclave(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Enclave:
    folder = tmp_path_factory.mktemp("client") / "enclave"
    at_rest.build_enclave(folder, "process", "tiny", 8, served.server.fetch_package)
    with at_rest.open_enclave(folder) as running:
        yield running


def scene(folder: Path, tmp_path: Path, enclave: Enclave, settings: RnmSettings) -> SplitScene:
    rng = np.random.default_rng(1)
    text = tmp_path / "texts.txt"
    text.write_text("\n".join(" ".join(rng.choice(WORDS, 6)) for _ in range(60)), "utf-8")
    return audit_scene.decoder_scene(
        Checkpoint.open(folder), enclave, settings, 8, AuditFiles(text, None, max_rows=None, seed=1)
    )


def share(staged: SplitScene, attack: NearHidden | ChannelAttack, who: str) -> float:
    """Tokens that the attack reads, of all that were sent."""
    one = next(adversary for adversary in staged.scene.adversaries if adversary.name == who)
    guess = attack(staged.scene.transcript, one.knowledge, Budget(60.0), np.random.default_rng(1))
    assert guess.by_token is not None
    return float((guess.by_token[:, 0] == staged.scene.truth.original.ids).mean())


def test_without_the_sanitizer_the_nearest_rows_are_the_text(folder: Path, tmp_path: Path, enclave: Enclave) -> None:
    staged = scene(folder, tmp_path, enclave, RnmSettings(None))
    assert share(staged, NearHidden(), MODEL_ONLY) == 1.0


def test_with_it_the_nearest_rows_are_what_was_sent_and_the_channel_reads_more(
    folder: Path, tmp_path: Path, enclave: Enclave
) -> None:
    staged = scene(folder, tmp_path, enclave, RnmSettings(3.0, p=0.2, share=0.2))
    (states,), (tokens,) = (staged.scene.transcript.all(kind) for kind in (Activations, Tokens))
    assert states.layer == 0 and len(states.hidden) == len(tokens.ids.ids)  # type: ignore[attr-defined]
    sent = float((tokens.ids.ids == staged.scene.truth.original.ids).mean())  # type: ignore[attr-defined]
    assert 0.2 < sent < 0.95, "some tokens cross unchanged, and some do not"
    assert share(staged, NearHidden(), MODEL_ONLY) == pytest.approx(sent)
    assert share(staged, ChannelAttack(), ALIKE) > sent


def test_another_model_is_refused(tmp_path: Path, enclave: Enclave) -> None:
    other = tiny.save("qwen2", tmp_path / "other")
    with pytest.raises(KeyForOtherModel):
        scene(other, tmp_path, enclave, RnmSettings())
