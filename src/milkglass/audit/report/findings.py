"""The findings of an audit in words: what raised each, why, and what can be changed.

There is no all-clear. Attacks improve, and a failed attack proves nothing. The best that an audit can say is how much
was recovered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from milkglass.attacks.embeddings.tuned_rows import TunedRows
from milkglass.audit.outcome import AttackResult, strongest
from milkglass.audit.report import state_findings
from milkglass.audit.report.id_rate import rate_finding
from milkglass.audit.report.result import Finding
from milkglass.audit.scene import Scene
from milkglass.sequences import Sequences
from milkglass.threat.observations import Tokens, Weights


def warnings(
    scene: Scene, cells: tuple[AttackResult, ...], spent: Mapping[str, Mapping[str, int]]
) -> tuple[Finding, ...]:
    """Returns all findings that apply, the gravest first."""
    best = strongest(cells)
    read = _running(scene, strongest(cells, "content top-1"), spent)
    result = [
        _broken(scene),
        read,
        state_findings.answers(scene),
        state_findings.named(scene, cells),
        _clusters(cells),
        _budget(spent) if read is None else None,
        _understated(scene, cells, best),
        rate_finding(scene),
        _hidden(cells),
        _members(scene),
        _small(scene),
        _repetition(scene),
        _special(scene),
        state_findings.lengths(scene),
        _limits(cells),
    ]
    return tuple(one for one in result if one is not None)


def _broken(scene: Scene) -> Finding | None:
    if scene.broken is None:
        return None
    return Finding(
        "This defence is broken",
        f"always with {scene.scheme['name']}",
        f"{scene.broken}.",
        "Choose another. No figure of this page says that it holds.",
    )


def _why(scene: Scene) -> str:
    """Returns why what is sent reveals text."""
    if state_findings.of_vectors(scene):
        return state_findings.why(scene)
    if scene.symbols is not None:
        return (
            f"An id is one of {scene.transcript.size:,} symbols, for many tokens each. The symbols beside it reveal "
            "which of them is meant, in each text separately; there is no key to solve."
        )
    if scene.promise.shared:
        return (
            "An id names a cluster and no token. The clusters beside it reveal which of its tokens is meant, in "
            "each text separately."
        )
    if scene.promise.aliases > 1:
        return (
            f"Each token has {scene.promise.aliases} scrambled ids for as long as the key is used. Counts are spread "
            "over them, and each still has its token's neighbours: all texts under one key are one cipher."
        )
    return (
        "Each token has one scrambled id for as long as the key is used. So all texts under one key are one "
        "substitution cipher, and frequencies and neighbours solve it, jointly over everything that was sent."
    )


def _running(scene: Scene, best: AttackResult | None, spent: Mapping[str, Mapping[str, int]]) -> Finding | None:
    if best is None or not best.value("content top-1") >= 0.1:  # nan, where no content token was sent, included
        return None
    advice = state_findings.change(scene)
    if scene.symbols is not None:
        advice = "Fewer symbols lower it (`obfuscate --symbols 8`, say), at a cost in accuracy; a new key does not."
    elif not state_findings.of_vectors(scene):
        advice = "A larger k or a smaller epsilon moves this figure by a few points only. " + (
            "A new key would not help: the first texts are read already."
            if _at_once(spent)
            else "A new key for each job lowers it where each job is small."
        )
        advice += f" Under one key: {passed}." if (passed := said(spent)) else ""
    return Finding(
        "An attacker reads your text",
        f"the strongest attack ({best.title}) reads 10 % or more of the content tokens: here "
        f"{best.measures['content top-1']}",
        _why(scene),
        "What must not be read must not be sent: leave it out, or replace it before encoding."
        f"{_classes(best)} {advice}",
    )


def _clusters(cells: tuple[AttackResult, ...]) -> Finding | None:
    solved = [cell for cell in cells if cell.in_group is not None]
    best = max(solved, key=lambda cell: cell.in_group or 0.0, default=None)
    if best is None or (best.in_group or 0) < 0.5:
        return None
    return Finding(
        "The clusters are known",
        f"half of the vocabulary or more is placed in its right cluster: here {100 * (best.in_group or 0):.1f} %",
        "Each scrambled embedding is a mixture of the public embeddings of its cluster. Sparse least squares finds "
        "which: what stays hidden is only the order inside a cluster.",
        "Nothing in the scheme's parameters prevents this. A larger k leaves more to guess.",
    )


def _budget(spent: Mapping[str, Mapping[str, int]]) -> Finding | None:
    passed = said(spent)
    if not passed:
        return None
    return Finding(
        "More text under one key is read better",
        f"an attacker reads 10 % of the content tokens or more after some number of tokens: here {passed}",
        "`milkglass key status` counts what was encoded under a key.",
        "Nothing: so much is read of the first texts already that a new key would not help."
        if _at_once(spent)
        else "Make a new key before that much is sent.",
    )


def _at_once(spent: Mapping[str, Mapping[str, int]]) -> bool:
    """Returns whether half of the content is already read at the first point where 10 % is."""
    return any(shares.get("50 %") == shares.get("10 %") is not None for shares in spent.values())


def _classes(best: AttackResult) -> str:
    """Returns a sentence about numbers, names and rare words if they are read."""
    read = {
        name: one for name, one in best.by_class.items() if name in ("number", "name", "rare word") and one.value >= 0.2
    }
    if not read:
        return ""
    return (
        f" Among what is read: {', '.join(f'{name}s {100 * one.value:.0f} %' for name, one in read.items())}; a name "
        "counts as read piece by piece. `milkglass sanitize` replaces words before they are encoded."
    )


def _understated(scene: Scene, cells: tuple[AttackResult, ...], best: AttackResult | None) -> Finding | None:
    """Returns a finding if an attack reads more than the measures by which papers judge a defence."""
    parts = [one for one in (_weak(cells, best), _nominal(scene, cells)) if one]
    if not parts:
        return None
    rule = "the strongest attack reads half as much again as nearest neighbours"
    if scene.scheme.get("k"):
        rule += ", or a blind guess in a cluster is right twice as often as 1/k"
    return Finding(
        "The usual measures understate this",
        rule,
        f"{'; '.join(parts)}. Papers look at one token at a time, and take the tokens of a cluster for equally common. "
        "A real attacker does neither.",
        "Judge by the strongest figure.",
    )


def _weak(cells: tuple[AttackResult, ...], best: AttackResult | None) -> str:
    weak = [cell for cell in cells if cell.attack in ("knn", "knn+", "ednn") and cell.state == "done"]
    most = max((cell.value("tokens top-1") for cell in weak), default=float("nan"))
    if best is None or not best.value("tokens top-1") > 1.5 * most:
        return ""
    return f"Nearest neighbours read {100 * most:.1f} % of the tokens, the strongest attack " + (
        f"{100 * best.value('tokens top-1'):.1f} %"
    )


def _nominal(scene: Scene, cells: tuple[AttackResult, ...]) -> str:
    k = int(scene.scheme.get("k", 0))
    guesses = [cell for cell in cells if cell.attack == "cluster-conditional" and cell.state == "done"]
    best = strongest(tuple(guesses), "tokens top-1")
    if best is None or not k or best.value("tokens top-1") < 2 / k:
        return ""
    got = 100 * best.value("tokens top-1")
    return f"1/k promises {100 / k:.0f} %, and always naming the commonest public token of a cluster gets {got:.0f} %"


def _hidden(cells: tuple[AttackResult, ...]) -> Finding | None:
    stated = [cell for cell in cells if cell.state == "done" and not math.isnan(cell.value("content hidden bits"))]
    if not stated:
        return None
    least = min(stated, key=lambda cell: cell.value("content hidden bits"))
    bits = least.measures["content hidden bits"]
    between = "the attack was cut short" if least.cut else f"{bits.low:.1f} to {bits.high:.1f} bits"
    return Finding(
        f"{'At most' if least.cut else 'About'} {bits.value:.1f} bits of each content token stay hidden",
        f"{between}; of all tokens {least.value('tokens hidden bits'):.1f}",
        f"This is the cross-entropy of one attack ({least.title.lower()}). A better one leaves less hidden, none more.",
        "Fewer symbols hide more, and cost accuracy.",
    )


def _members(scene: Scene) -> Finding | None:
    named = TunedRows.members_of(scene.transcript)
    trained = [one.ids for one in scene.transcript.all(Tokens) if one.purpose == "train"]
    if named is None or not trained:
        return None
    occurred = Sequences.of(part for one in trained for part in one).counts(len(named)) > 0
    ordinary = scene.truth.ordinary[scene.truth.inverse]
    named, occurred = named & ordinary, occurred & ordinary
    hits = int((named & occurred).sum())
    if not hits or hits / named.sum() < 1.2 * occurred.sum() / ordinary.sum():
        return None  # all rows moved, as under a tied head: that says nothing
    return Finding(
        "The tuned model tells which tokens it was trained on",
        "rows of the table that moved name the tokens of the training text better than chance: here "
        f"{named.sum():,} rows, {100 * hits / named.sum():.1f} % of them correctly, which are "
        f"{100 * hits / occurred.sum():.1f} % of those that occurred",
        "A row gets a gradient only where its token occurs. Anyone with the model before and after, and no text at "
        "all, sees which.",
        "Train with frozen tables, at a cost in accuracy.",
    )


def _small(scene: Scene) -> Finding | None:
    if not scene.promise.below_k:
        return None
    return Finding(
        "The promise is not kept for every token",
        f"a token is in a cluster smaller than k: here {scene.promise.below_k:,}, of which "
        f"{scene.promise.singletons:,} are alone and sent verbatim",
        "The paper's clustering leaves small clusters behind.",
        "Make a new key without --set leftover=paper.",
    )


def _repetition(scene: Scene) -> Finding | None:
    texts = [one.tobytes() for one in scene.transcript.tokens]
    repeated = 1 - len(set(texts)) / len(texts) if texts else 0.0
    if repeated < 0.01:
        return None
    return Finding(
        "Equal texts are seen to be equal",
        f"1 % or more of the texts occur before: here {100 * repeated:.1f} %",
        "The server sees which texts repeat, word for word, and how often; a known form letter reads all its tokens.",
        "Send each text once.",
    )


def _special(scene: Scene) -> Finding | None:
    count = scene.promise.verbatim
    if not count:
        return None
    if scene.symbols is not None:
        words = bool(scene.scheme.get("function_words"))
        return Finding(
            f"Special tokens{', function words' if words else ''} and lengths are read by anyone",
            f"a token has a symbol of its own: here {count:,}",
            "Where a text begins and ends, how long it is, where these tokens are: this is not hidden.",
            f"{'Fewer --function-words; s' if words else 'Nothing: s'}pecial tokens keep their symbols, since the "
            "model needs them.",
        )
    return Finding(
        "Special tokens and lengths are read by anyone",
        f"a row is permuted and not mixed: here {count:,}, special tokens and empty rows",
        "Where a text begins and ends, how long it is, who speaks in a conversation: this is not hidden.",
        "--set cluster_special=true mixes special tokens too; their places identify them all the same.",
    )


def _limits(cells: tuple[AttackResult, ...]) -> Finding | None:
    left = sorted({cell.title for cell in cells if cell.cut or cell.state == "failed"})
    if not left:
        return None
    return Finding(
        "Some attacks were cut short",
        "an attack was ended by the budget, or failed",
        f"These did not finish: {', '.join(left)}. Their figures have no interval: more time may raise them.",
        "Give a larger --budget: the audit goes on where it stopped.",
    )


def distortion(scene: Scene) -> float:
    """Returns the mean cosine of the mixed embeddings with their originals, over the ordinary vocabulary.

    1 means unchanged. It is nan if the server has no table or a wider one. The effect on accuracy is known only after
    training both models.
    """
    import torch

    public = scene.adversaries[0].knowledge.public_model
    assert public is not None
    if not any(one.model.has_table for one in scene.transcript.all(Weights)):
        return float("nan")  # the table is in the client's half
    mixed, plain = scene.transcript.table, public.table
    if mixed.shape[1] != plain.shape[1]:
        return float("nan")
    symbols = scene.symbols
    if symbols is not None:
        tokens = torch.from_numpy(np.flatnonzero(scene.truth.ordinary))
        rows = mixed[torch.from_numpy(symbols)[tokens]]
        return float(torch.nn.functional.cosine_similarity(rows, plain[tokens]).mean())
    ordinary = np.flatnonzero(scene.truth.ordinary[scene.truth.inverse])
    cosines = torch.nn.functional.cosine_similarity(
        mixed[torch.from_numpy(ordinary)], plain[torch.from_numpy(scene.truth.inverse[ordinary])]
    )
    return float(cosines.mean())


def said(spent_by: Mapping[str, Mapping[str, int]]) -> str:
    """Returns the numbers of tokens after which each share is read, in words."""
    parts = []
    for who, shares in spent_by.items():
        most = {tokens: share for share, tokens in shares.items()}  # of equal ones the last, which is the highest
        parts += [f"{share} within {tokens:,} tokens by the attacker with {who}" for tokens, share in most.items()]
    return "; ".join(parts)
