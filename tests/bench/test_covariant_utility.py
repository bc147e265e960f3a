"""bench/covariant_utility.py: a scrambled model that keeps the function has the same utility as the plain one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.client.obfuscate.scramble import scramble
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.permuted import Permuted
from tests import tiny
from tests.bench import kit

TEXTS = ["the nurse", "hello", "the doctor reads a letter to the nurse", "a b c"]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """Of bench/, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(kit.BENCH))
        import covariant_utility  # type: ignore[import-not-found]

        yield covariant_utility


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Codec]]:
    """Folder and codec."""
    folder = tmp_path_factory.mktemp("covariant")
    base = Checkpoint.open(tiny.save("llama-tied", folder / "plain"))
    key = new_key(base, "", Permuted(), base.digest(), bytes(32))
    scramble(base, key, folder / "scrambled")
    return {
        "plain": (base.folder, public_codec(base)),
        "scrambled": (folder / "scrambled", Codec.open(key, base.folder)),
    }


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_answers_are_the_plain_models_whatever_stands_beside_a_text(
    bench: ModuleType, models: dict[str, tuple[Path, Codec]]
) -> None:
    expected = bench.answers(loaded(models["plain"][0]), models["plain"][1], TEXTS, 8)
    folder, codec = models["scrambled"]
    model = loaded(folder)
    assert len(set(expected)) > 1
    assert bench.answers(model, codec, TEXTS, 8) == expected
    assert [bench.answers(model, codec, [one], 8)[0] for one in TEXTS] == expected


def test_a_codec_of_another_key_is_refused(bench: ModuleType, models: dict[str, tuple[Path, Codec]]) -> None:
    with pytest.raises(ValueError, match="another id"):
        bench.answers(loaded(models["scrambled"][0]), models["plain"][1], TEXTS, 8)


def test_utility_of_files(bench: ModuleType, models: dict[str, tuple[Path, Codec]], tmp_path: Path) -> None:
    prompts = [{"prompt": one, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} for one in TEXTS]
    dialogues = [{"dialogue": one, "summary1": "a nurse", "summary2": "no", "summary3": "no"} for one in TEXTS]
    for name, rows in (("ifeval", prompts), ("dialogsum", dialogues)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    asked = bench.Questions.read(tmp_path / "ifeval", 2, tmp_path / "dialogsum", 3)
    assert asked.references == ("a nurse",) * 3
    assert [one.endswith(f"\n\n{text}") for one, text in zip(asked.dialogues, TEXTS, strict=False)] == [True] * 3
    found = {name: bench.utility(*model, asked) for name, model in models.items()}
    assert found["plain"] == found["scrambled"]
    units = {name: one.units for name, one in found["plain"].items()}
    of_rules = {f"ifeval {how}, {unit}": 2 for how in ("strict", "loose") for unit in ("prompts", "instructions")}
    assert units == {"rouge-1": 3, "rouge-l": 3, **of_rules}


def test_nothing_is_asked_without_files(bench: ModuleType, models: dict[str, tuple[Path, Codec]]) -> None:
    assert bench.utility(*models["plain"], bench.Questions.read(None, 2, None, 2)) == {}
