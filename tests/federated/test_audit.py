"""The audit of recorded updates: rounds done again, texts read where nothing hides them, reasons where nothing is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape
from transformers import BertConfig, BertForMaskedLM

from milkglass.attacks.gradients.free_tokens import FreeTokens
from milkglass.audit.updates.attack import (
    DEFAULT_INVERSIONS,
    DEFAULT_SHADOW_ATTACKS,
    audit_updates,
    chosen_attack_names,
)
from milkglass.audit.updates.page import render
from milkglass.audit.updates.replay import RecordedRun, SiteTexts
from milkglass.audit.updates.report import SHADOWS_AS_TEXTS, UpdateAudit, UpdateResult, token_share, verdict
from milkglass.audit.updates.scenes import AuditedSite, PublicSource
from milkglass.errors import InvalidUpdate, UsageError
from milkglass.federated.prepare import labels_of, prepare_site
from milkglass.federated.rounds import Tensors
from milkglass.federated.run import InProcessSites, Replies, Sites
from milkglass.federated.site import FederatedTraining
from milkglass.gradient_defences.defence import NoDefence
from milkglass.gradient_defences.dropout import Dropout
from milkglass.metrics.interval import Interval
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.selection import SelectionSettings
from milkglass.sanitizers.table import open_table
from milkglass.threat.budget import Budget
from tests import tiny
from tests.cli.kit import call, document, refused
from tests.federated.kit import NAMES, SECRET, World, equal, rows_file

SGD, AVG = FederatedTraining("fedsgd", 2, 0.1, 1), FederatedTraining("fedavg", 1, 0.1, 2)


def deep(folder: Path) -> Path:
    """Three layers: of two, the last one's gradients have too little rank for DAGER."""
    tiny.save("bert", folder)
    torch.manual_seed(0)
    wide = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96}
    model = BertForMaskedLM(BertConfig(**{**tiny.BERT, **wide}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


class Heard(Sites):
    """What all sites were sent in each round. Site b does not answer the first time."""

    def __init__(self, inner: InProcessSites) -> None:
        self.inner, self.sent = inner, list[Tensors]()

    def ask(self, round: int, weights: Tensors, training: FederatedTraining) -> Replies:
        self.sent.append({name: one.clone() for name, one in weights.items()})
        found = self.inner.ask(round, weights, training)
        if round:
            return found
        return Replies([one for one in found.updates if one.site != "b"], {"b": "it slept"})


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, searches: Path) -> Iterator[dict[str, World]]:
    """The same files in two runs of two rounds, of one text each: "ghost" and "plain"; site b missed the first."""
    root = tmp_path_factory.mktemp("audit")
    model = deep(root / "model")
    (root / "files").mkdir()
    files = {name: rows_file(root / "files" / f"{name}.jsonl", 3, i) for i, name in enumerate(NAMES)}
    labels = labels_of([*files.values()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILKGLASS_CACHE", str(searches))
        ghost = Ghost.open(model, selection=SelectionSettings(way="random"))
        for kind in ("ghost", "plain"):
            for name, path in files.items():
                place = root / kind / "sites" / name
                prepare_site(path, place, labels, model, ghost if kind == "ghost" else None, seed=7)
        yield {kind: World(model, root / "files", root / kind / "sites", ghost) for kind in ("ghost", "plain")}


@pytest.fixture(scope="module")
def heard(scene: Mapping[str, World]) -> dict[str, Heard]:
    found = {}
    for kind, world in scene.items():
        step = world.step()
        sites = world.at(world.ready)
        found[kind] = Heard(InProcessSites(sites, step, world.demand if kind == "ghost" else None))
        world.run(world.ready.parent, sites, SGD, found[kind])
    return found


def audited(
    world: World, site: str = "a", names: list[str] | None = None, public: PublicSource = PublicSource()
) -> tuple[UpdateAudit, list[dict[str, Any]]]:
    texts = SiteTexts(world.files / f"{site}.jsonl", world.ready / site, world.model)
    recorded = RecordedRun(world.ready.parent, site, world.model)
    return audit_updates(AuditedSite(recorded, texts, open_table(world.model)[0], public), names, Budget(60))


def of(found: UpdateAudit, name: str) -> UpdateResult:
    return next(one for one in found.results if one.attack == name)


def test_the_rounds_are_done_again_to_the_last_bit(scene: Mapping[str, World], heard: Mapping[str, Heard]) -> None:
    world = scene["ghost"]
    rounds = [*RecordedRun(world.ready.parent, "a", world.model).rounds()]
    assert [one.number for one in rounds] == [0, 1]
    assert all(equal(dict(one.weights), dict(sent)) for one, sent in zip(rounds, heard["ghost"].sent, strict=True))
    assert not equal(dict(rounds[0].weights), dict(rounds[1].weights))
    assert [one.number for one in RecordedRun(world.ready.parent, "b", world.model).rounds()] == [1]


def test_bare_texts_come_back_in_every_round(scene: Mapping[str, World], heard: Mapping[str, Heard]) -> None:
    """The weights of the second round are replayed: with others nothing is in DAGER's spans."""
    found, readings = audited(scene["plain"], names=["free-tokens", "dager"])
    dager = of(found, "dager")
    assert dager.state == "done" and dager.rounds == found.rounds == (0, 1) and found.text_count == 2
    assert dager.measures["exact texts"].value == 1 and dager.trained_measures == dager.measures
    assert not dager.left_out_rounds
    read = [one for one in readings if one["attack"] == "dager"]
    assert [one["readings"] for one in read] == [one["texts"] for one in read] and SECRET in read[0]["texts"][0]
    assert of(found, "free-tokens").measures["token recall"].value > 0.6, "all but what stands there twice"
    assert chosen_attack_names(None, uses_ghost=False) == [
        "free-tokens",
        "float-holes-rows",
        "dager",
        "surviving-entries",
    ]
    sentence = found.to_json()["verdict"]
    assert "at least 100.0 %" in sentence and "site a" in sentence and "not pass through GHOST" in sentence
    assert SECRET not in json.dumps(found.to_json())
    assert 0 < found.floors["commonest token"] < 1


def test_with_ghost_the_shadows_come_back_and_are_not_the_texts(
    scene: Mapping[str, World], heard: Mapping[str, Heard], cache: None
) -> None:
    found, readings = audited(scene["ghost"], names=["dager", *DEFAULT_SHADOW_ATTACKS])
    assert chosen_attack_names(None, uses_ghost=True) == [*DEFAULT_INVERSIONS, *DEFAULT_SHADOW_ATTACKS]
    dager = of(found, "dager")
    assert dager.trained_measures is not None and dager.trained_measures["exact texts"].value == 1
    assert dager.measures["rouge-1"].value < 0.3
    assert of(found, SHADOWS_AS_TEXTS).measures == dager.measures, "an exact inversion is no better than the shadows"
    for name in DEFAULT_SHADOW_ATTACKS:
        one = of(found, name)
        assert one.state == "done" and one.trained_measures is None and 0 <= token_share(one.measures).value < 1
    assert any(SECRET in text for one in readings for text in one["texts"])
    sentence = found.to_json()["verdict"]
    most = max(100 * token_share(one.measures).value for one in found.results)
    assert f"at least {most:.1f} %" in sentence
    assert "100.0 % were read" in sentence and "read more" in sentence
    assert "sees these updates" in sentence
    half = {"tokens top-1": Interval(0.5, 0.4, 0.6, 9), "rouge-1": Interval(0.5, 0.4, 0.6, 9)}
    fewer = replace(
        found, results=(replace(dager, trained_measures=half), *(of(found, name) for name in DEFAULT_SHADOW_ATTACKS))
    )
    assert "with all shadows" in fewer.to_json()["verdict"]
    late, _ = audited(scene["ghost"], "b", ["dager"])
    assert late.rounds == (1,) and late.text_count == 1


def test_with_public_text_shadows_are_decoded_and_the_verdict_tells_it(
    scene: Mapping[str, World], heard: Mapping[str, Heard], cache: None
) -> None:
    """Decoding runs by default and reads more than the paper's rules, and the more public text is like the texts."""
    world = scene["ghost"]
    lines = [json.loads(line)["text"] for line in (world.files / "a.jsonl").read_text().splitlines()]
    alike = [f"{' '.join(reversed(one.split()))} {SECRET}" for one in lines for _ in range(4)]
    rules = [*DEFAULT_SHADOW_ATTACKS]
    found, _ = audited(world, names=rules, public=PublicSource([*alike, *lines], "f.txt"))
    assert found.public["left_out"] == 2, "who has the very text needs no attack"
    assert found.public["given"] == len(alike) + 1 and found.public["own"] == 1, "the third text is behind no update"
    best = of(found, "shadow-decoding")
    assert best.state == "done" and best.rounds == (0, 1)
    read = token_share(best.measures).value
    assert read > 0.3 + max(token_share(of(found, name).measures).value for name in rules if name != best.attack)
    sentence = found.to_json()["verdict"]
    assert f"at least {100 * read:.1f} %" in sentence and "(shadow-decoding;" in sentence
    assert "of the shadows" not in sentence, "nothing was run that reads them"
    assert "(13 of f.txt, 1 of" in found.to_json()["attackers_know"][-1]
    assert "--public FILE" in found.advice, "a few hundred tokens are few"
    bare, _ = audited(world, names=["shadow-decoding"])
    assert token_share(of(bare, "shadow-decoding").measures).value < read
    assert "--public FILE" in bare.to_json()["advice"]


def test_an_attack_that_did_not_run_is_the_reason_in_the_verdict(
    scene: Mapping[str, World], heard: Mapping[str, Heard]
) -> None:
    found, _ = audited(scene["plain"], names=["free-tokens", "dager"])
    first, second = found.results
    absent = replace(first, state="does not apply", reason="no noise", measures={})
    unread = replace(second, state="not run", reason="the budget was spent before its turn", measures={})
    assert verdict(replace(found, results=(absent, unread))).startswith(f"Nothing could be attacked ({unread.reason})")
    assert "no attack applies" in verdict(replace(found, results=(absent,)))


def test_sums_of_several_steps_are_refused_and_one_step_is_not(scene: Mapping[str, World], tmp_path: Path) -> None:
    world = scene["plain"]
    shutil.copytree(world.ready, tmp_path / "run" / "sites")
    many = replace(world, ready=tmp_path / "run" / "sites")
    sites = many.at(many.ready)
    many.run(tmp_path / "run", sites, AVG, InProcessSites(sites, many.step(), None))
    found, _ = audited(many)
    assert found.rounds == () and [*found.refused] == [0] and "sum of 2 steps" in found.refused[0]
    assert all(one.state == "does not apply" for one in found.results)
    assert found.to_json()["verdict"].startswith(f"Nothing could be attacked ({found.refused[0]}")
    shutil.copytree(world.ready, tmp_path / "one" / "sites")
    single = replace(world, ready=tmp_path / "one" / "sites")
    single.run(tmp_path / "one", sites, replace(AVG, batch_size=3), InProcessSites(sites, single.step(), None))
    found, _ = audited(single, names=["free-tokens", "surviving-entries", "shadow-max"])
    assert found.rounds == (0,) and found.text_count == 3 and of(found, "free-tokens").state == "done"
    assert "3 texts" in of(found, "surviving-entries").reason
    assert "no shadows" in of(found, "shadow-max").reason


def test_what_does_not_belong_together_is_refused(
    scene: Mapping[str, World], heard: Mapping[str, Heard], tmp_path: Path
) -> None:
    world = scene["plain"]
    run, model = world.ready.parent, world.model
    with pytest.raises(UsageError, match="no update of site z") as caught:
        RecordedRun(run, "z", model)
    assert caught.value.hint.endswith(": a, b, c")
    with pytest.raises(UsageError, match=r"run\.json"):
        RecordedRun(tmp_path, "a", model)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    state = json.loads((copy / "run.json").read_text())
    for wrong in ({"seed": 1}, {"lr": 0.2}):
        (copy / "run.json").write_text(json.dumps(state | {"settings": state["settings"] | wrong}))
        with pytest.raises(UsageError, match="updates do not lead"):
            RecordedRun(copy, "a", model)
    (copy / "run.json").write_text(json.dumps({name: one for name, one in state.items() if name != "settings"}))
    with pytest.raises(UsageError, match=f"{re.escape(str(copy))} .*settings"):
        RecordedRun(copy, "a", model)
    with pytest.raises((UsageError, InvalidUpdate)):
        (copy / "run.json").write_text(json.dumps(state))
        RecordedRun(copy, "a", tiny.save("bert", tmp_path / "other"))
    lines = (world.files / "a.jsonl").read_text().splitlines()
    for other in (lines[:2], [lines[1], lines[0], lines[2]], [*lines[:2], lines[2].replace(SECRET, "the nurse")]):
        path = tmp_path / "other.jsonl"
        path.write_text("\n".join(other) + "\n")
        with pytest.raises(UsageError, match=r"other\.jsonl"):
            SiteTexts(path, world.ready / "a", model)
    with pytest.raises(UsageError, match="another model"):
        SiteTexts(world.files / "a.jsonl", scene["ghost"].ready / "a", tmp_path / "other")


def test_attackers_are_told_the_shield_and_the_weights_of_the_round(
    scene: Mapping[str, World], heard: Mapping[str, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []

    def watched(self: Any, batch: Any, *rest: Any) -> Any:
        now = next(one for one in batch.step.module.parameters())
        seen.append((batch.step.uses_dropout, bool(torch.equal(now, next(iter(recorded.step.module.parameters()))))))
        return [np.empty(0, np.int64)] * batch.size

    monkeypatch.setattr(FreeTokens, "invert", watched)
    world = scene["plain"]
    texts = SiteTexts(world.files / "a.jsonl", world.ready / "a", world.model)
    recorded = RecordedRun(world.ready.parent, "a", world.model)
    for defence in (NoDefence(), Dropout()):
        site = AuditedSite(recorded, texts, open_table(world.model)[0], defence=defence)
        audit_updates(site, ["free-tokens"], Budget(60))
    assert seen == [(False, True)] * 2 + [(True, True)] * 2


def test_an_attack_that_fails_says_so_and_quotes_nothing(
    scene: Mapping[str, World], heard: Mapping[str, Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(FreeTokens, "invert", broken)
    found, _ = audited(scene["plain"], names=["free-tokens", "dager"])
    assert (of(found, "free-tokens").state, of(found, "free-tokens").reason) == ("failed", "RuntimeError")
    assert of(found, "dager").state == "done"


def test_the_command(scene: Mapping[str, World], heard: Mapping[str, Heard], tmp_path: Path, cache: None) -> None:
    world = scene["ghost"]
    words = ("federated", "audit", world.ready.parent, "--model", world.model, "--site", "a")
    words += ("--text", world.files / "a.jsonl", "--budget", "2s")
    result = call(
        *words, "--out", tmp_path / "a.json", "--readings", tmp_path / "read.jsonl", "--page", tmp_path / "a.html"
    )
    assert result.exit_code == 0, result.stderr
    assert "Of the shadows" in result.stdout and "dager" in result.stdout
    assert all(known in result.stdout for known in ("model in every round", "labels", "lengths"))
    read = (tmp_path / "read.jsonl").read_text()
    assert SECRET in read and (tmp_path / "read.jsonl").stat().st_mode & 0o777 == 0o600
    answer = json.loads((tmp_path / "a.json").read_text())
    assert SECRET not in result.stdout + result.stderr + json.dumps(answer)
    assert answer["site"] == "a" and answer["ghost"] is True and answer["attackers_know"][3] == "lengths"
    assert "(1 of the site's own" in answer["attackers_know"][-1] and "--public FILE" in result.stdout
    assert "shadow-decoding" in result.stdout
    refused(call(*words, "--out", tmp_path / "a.json"), 2, "a.json exists")
    refused(call(*words, "--page", tmp_path / "a.html"), 2, "a.html exists")
    page = (tmp_path / "a.html").read_text("utf-8")
    assert (tmp_path / "a.html").stat().st_mode & 0o777 == 0o600
    assert str(escape(answer["verdict"])) in page and "The shadows that were trained on" in page
    found = document(call(*words, "--json", "--attacks", "free-tokens"))
    assert [one["attack"] for one in found["found"]] == ["free-tokens", SHADOWS_AS_TEXTS]
    assert np.isclose(found["found"][0]["trained"]["token recall"]["value"], 1, atol=0.3)
    (tmp_path / "public.txt").write_text((world.files / "a.jsonl").read_text().replace(SECRET, "") + "other\n")
    given = document(call(*words, "--json", "--attacks", "free-tokens", "--public", tmp_path / "public.txt"))
    assert (
        given["public"]["name"] == "public.txt" and given["public"]["given"] == 4 and "--public FILE" in given["advice"]
    )
    refused(call(*words, "--public", tmp_path / "none.txt"), 2, "none.txt")
    refused(call(*words, "--attacks", "fog"), 2, "attack 'fog'")
    refused(call(*words, "--rows", tmp_path / "none"), 2, f"no folder {tmp_path / 'none'}")
    shutil.copytree(world.ready, tmp_path / "run" / "sites")
    begun = (words[0], words[1], tmp_path / "run", *words[3:5])
    given = ("--site", "north", "--text", world.files / "a.jsonl")
    answer = call(*begun, *given)
    refused(answer, 2, "no rows of a site north")
    assert ": a, b, c" in answer.stderr
    (tmp_path / "run" / "sites" / ".north.parts").mkdir()
    answer = call(*begun, *given)
    refused(answer, 2, "interrupted")
    assert "`milkglass federated run`" in answer.stderr and ".north" not in answer.stderr
    refused(call(*words, "--site", "../b"), 2, "a site's name")


def test_the_page_has_the_figures_of_the_report_and_escapes_what_was_read(
    scene: Mapping[str, World], heard: Mapping[str, Heard]
) -> None:
    found, readings = audited(scene["plain"], names=["free-tokens", "dager"])
    page = render(found, [{**one, "readings": ["<script>x</script>"]} for one in readings])
    assert found.site == "a" and '<section class="verdict most">' in page and str(escape(verdict(found))) in page
    assert all(str(escape(note)) in page for note in found.notes())
    assert SECRET in page and "&lt;script&gt;x" in page and "<script" not in page
    assert "guessing the commonest" in page and "This page shows private text" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    nothing = replace(found, results=(), rounds=(), refused={0: "no texts"}, floors={})
    page = render(nothing, [])
    assert '<section class="verdict unknown">' in page and "Nothing could be attacked (no texts)" in page
    assert "round 1 is left out: no texts" in page and "<svg" not in page and "nan" not in page


def test_what_is_known_of_a_batch_is_told_and_is_no_reading() -> None:
    """A bag of a batch's shadows, whosever they are, is not the texts; who decodes was given places."""
    one = Interval(0.3, 0.2, 0.4, 8)
    bag = {"token recall": one, "tokens named": Interval(1, 0.9, 1, 2), "rouge-1": one}
    decoded = {"tokens top-1": Interval(0.8, 0.7, 0.9, 8), "rouge-1": Interval(0.8, 0.7, 0.9, 8)}
    taken = UpdateResult(
        "free-tokens", "", "server", "done", measures={**bag, "tokens named": one}, trained_measures=bag
    )
    of_ghost = (taken, UpdateResult("shadow-decoding", "", "exact inversion", "done", measures=decoded))
    public = {"name": "no file", "given": 0, "own": 0, "left_out": 0, "tokens": 0}
    ghost = UpdateAudit("a", True, (0,), {}, 8, of_ghost, {}, public)
    sentence = verdict(ghost)
    assert re.match("Of the shadows .* 30.0 % were read .* 100.0 % of the", sentence)
    assert re.search("with all shadows .* at least 80.0 %", sentence)
    noisy = replace(ghost, noise_defence="dp-sgd (clip = 1.0, noise = 0.5)")
    assert verdict(noisy).startswith(f"{sentence} Noise ") and "(dp-sgd (clip = 1.0, noise = 0.5))" in verdict(noisy)
    bare = UpdateResult("free-tokens", "", "server", "done", measures=bag)
    plain = verdict(replace(ghost, uses_ghost=False, results=(bare,)))
    assert "at least 30.0 %" in plain and "site a" in plain
    assert re.search(r"knows 100\.0 % of the different tokens .*\(free-tokens\)", plain)
    alone = verdict(replace(ghost, results=of_ghost[:1]))
    assert "No attack on shadows" in alone
