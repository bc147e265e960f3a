"""The findings of an audit: what raised each, why, and what can be changed. The words are in texts.toml.

A function of a finding returns the values for its texts, or None if the finding does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from milkglass.attacks.embeddings.tuned_rows import TunedRows
from milkglass.audit.outcome import AttackResult, strongest
from milkglass.audit.report.result import Finding, IdInformation
from milkglass.audit.report.texts import TEXTS, fill_template
from milkglass.audit.scene import DefenceWords, Scene
from milkglass.client.obfuscate.symbol_rate import bits_in, most_bits
from milkglass.sequences import Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.observations import Activations, Tokens, Weights

TokensToReach = Mapping[str, Mapping[str, int]]  # for each adversary and share, the tokens after which it is read
FindingValues = Mapping[str, Any] | None
NO_ATTACKS: Mapping[str, Attack] = {}
MIN_COSINE_OF_PUBLIC_ROWS = 0.999  # above this mean cosine with the public rows, a table's rows are those
NO_FLOORS: Mapping[str, float] = {}  # of what guessing gives, nothing is known


def all_findings(
    scene: Scene,
    results: tuple[AttackResult, ...],
    tokens_to_reach: TokensToReach,
    attacks: Mapping[str, Attack] = NO_ATTACKS,
    floors: Mapping[str, float] = NO_FLOORS,
) -> tuple[Finding, ...]:
    """Returns all findings that apply, the gravest first, and then those that attacks bring.

    Args:
        scene: what was attacked.
        results: the result of each attack by each attacker.
        tokens_to_reach: after how many tokens each share is read.
        attacks: the attacks that may bring a finding of their own, by name.
        floors: what guessing gives (`Audit.floors`).
    """
    budget_texts = {"spent": curve_in_words(tokens_to_reach), "at_once": _is_read_at_once(tokens_to_reach)}
    words = words_of(scene)
    texts_of_read = {
        part: fill_template(getattr(words, part), scene=scene, **budget_texts) for part in ("why", "change")
    }
    best = strongest(results, "content top-1")
    is_read = best is not None and best.value("content top-1") >= 0.1
    best_naming = best_naming_attack(results) if scene.sends_states else None
    states = scene.transcript.all(Activations)
    rate = id_information(scene)
    incomplete = sorted({cell.title for cell in results if cell.cut or cell.state == "failed"})
    not_begun = sorted({cell.title for cell in results if cell.state == "not run"} - {*incomplete})
    rules: dict[str, FindingValues] = {
        "broken": None if scene.broken is None else {},
        "read": {"best": best, "classes": _exposed_classes(best), **texts_of_read} if is_read and best else None,
        **dict.fromkeys(words.findings, {}),
        "named": _named_words(best_naming, floors),
        "clusters": _right_cluster_share(scene, results),
        "budget": budget_texts if budget_texts["spent"] and not is_read else None,
        "understated": _measures_beyond_papers(scene, results),
        "rate": None if rate is None else {"rate": rate},
        "hidden": _hidden_bits(results),
        "members": _membership(scene),
        "small": {} if scene.cluster_report.below_k else None,
        "repetition": _repeated_share(scene),
        "special_symbols" if scene.symbols is not None else "special": {} if scene.cluster_report.verbatim else None,
        "lengths": {} if scene.sends_states and not all(state.pooled for state in states) else None,
        "limits": {"left": incomplete, "not_begun": not_begun} if incomplete or not_begun else None,
    }
    findings = [
        _fill_finding(TEXTS["finding"][name], {"scene": scene, **values})
        for name, values in rules.items()
        if values is not None
    ]
    own_findings = {name: attack.finding for name, attack in attacks.items() if attack.finding is not None}
    reading_cells = [cell for cell in results if cell.attack in own_findings and cell.value("content top-1") >= 0.1]
    return (
        *findings,
        *(_fill_finding(own_findings[cell.attack], {"scene": scene, "result": cell}) for cell in reading_cells),
    )


def _fill_finding(texts: Mapping[str, str], values: Mapping[str, Any]) -> Finding:
    return Finding(**{part: fill_template(text, **values) for part, text in texts.items()})


def words_of(scene: Scene) -> DefenceWords:
    """Returns what the report says about the scene's defence: its own words, or those for what it sends."""
    if scene.words is not None:
        return scene.words
    if scene.sends_states:
        is_mixed = any(states.mixed_row_counts is not None for states in scene.transcript.all(Activations))
        return DefenceWords(**TEXTS["defence"]["mixed" if is_mixed else "states"])
    kind = "symbols" if scene.symbols is not None else "clusters" if scene.cluster_report.shared else "tokens"
    kind = "aliases" if kind == "tokens" and scene.cluster_report.aliases > 1 else kind
    return DefenceWords(**{**TEXTS["defence"]["tokens"], **TEXTS["defence"][kind]})


def words_of_enclave(attestation_text: str, attested: bool) -> DefenceWords:
    """Returns what the report says about an enclave's vectors.

    Args:
        attestation_text: what the enclave's answer proves, in words.
        attested: whether hardware vouches for it.
    """
    risk = "" if attested else "The provider, whose table it is, bears that risk. "
    figures = "The figures are of your prompts: so much of them the provider can read."
    notice = f"The enclave: {attestation_text}. {risk}{figures}"
    return DefenceWords(**TEXTS["defence"]["enclave"], notice=notice, findings=("answers",))


def best_naming_attack(results: tuple[AttackResult, ...]) -> AttackResult | None:
    """Returns the best attack that reads words without their order."""
    naming_cells = [cell for cell in results if not math.isnan(cell.value("bag f1"))]
    return max(naming_cells, key=lambda cell: cell.value("bag f1"), default=None)


def exceeds_guessing(naming: AttackResult, floors: Mapping[str, float]) -> bool:
    """Returns whether an attack names words better than the same words for every text do, by the low end of its F1."""
    f1, floor = naming.measures["bag f1"], floors.get("same words f1", math.nan)
    low = f1.value if math.isnan(f1.low) else f1.low
    return math.isnan(floor) or low > floor


def floor_text(floors: Mapping[str, float], name: str) -> str:
    """Returns what guessing gives, such as "7.3 %"; "" if it is not known."""
    share = floors.get(name, math.nan)
    return "" if math.isnan(share) else f"{100 * share:.1f} %"


def _named_words(naming: AttackResult | None, floors: Mapping[str, float]) -> FindingValues:
    """Returns the attack that names most words, if its F1 is 0.1 or more and above what guessing gives."""
    if naming is None or naming.value("bag f1") < 0.1 or not exceeds_guessing(naming, floors):
        return None
    return {"best": naming, "guessed": floor_text(floors, "same words f1")}


def id_information(scene: Scene) -> IdInformation | None:
    """Returns the bits that an id can reveal of its token, whatever is known; None if it stands for one token."""
    if scene.symbols is None:
        return None
    sent, size = scene.truth.tokens.ids, scene.transcript.vocab_size
    ids = scene.symbols[sent[scene.truth.ordinary[sent]]]
    responses = scene.adversaries[0].knowledge.responses
    occurrences, epsilon = np.bincount(ids, minlength=size), responses.epsilon if responses else None
    return IdInformation(size, most_bits(size, responses), bits_in(occurrences, responses), epsilon)


def curve_in_words(tokens_to_reach: TokensToReach) -> str:
    """Returns the numbers of tokens after which each share is read, in words; "" if none is read."""
    sentences = []
    for adversary, shares in tokens_to_reach.items():
        highest_shares = {tokens: share for share, tokens in shares.items()}  # the last of shares at equal tokens
        sentences += [
            f"{share} within {tokens:,} tokens by the attacker with {adversary}"
            for tokens, share in highest_shares.items()
        ]
    return "; ".join(sentences)


def _is_read_at_once(tokens_to_reach: TokensToReach) -> bool:
    """Returns whether half of the content is already read at the first point where 10 % is."""
    return any(shares.get("50 %") == shares.get("10 %") is not None for shares in tokens_to_reach.values())


def _exposed_classes(best: AttackResult) -> str:
    """Returns, in words, the shares of numbers, names and rare words that are read, as far as they are 20 % or more."""
    shares = {name: share for name, share in best.by_class.items() if name in ("number", "name", "rare word")}
    return ", ".join(f"{name}s {100 * share.value:.0f} %" for name, share in shares.items() if share.value >= 0.2)


def _right_cluster_share(scene: Scene, results: tuple[AttackResult, ...]) -> FindingValues:
    """Returns the largest share of guesses in the right cluster, if it is 0.5 or more and the table has clusters."""
    share = max((cell.in_group for cell in results if cell.in_group is not None), default=0.0)
    return {"share": share} if share >= 0.5 and not _has_public_rows(scene) else None


def _has_public_rows(scene: Scene) -> bool:
    """Returns whether the server's table is the public one, row by row, as where words are sent as text."""
    public = scene.adversaries[0].knowledge.public_model
    if public is None or not any(weights.model.has_table for weights in scene.transcript.all(Weights)):
        return False
    rows, public_rows = scene.transcript.table, public.table
    if rows.shape != public_rows.shape:
        return False
    cosines = torch.nn.functional.cosine_similarity(rows.float(), public_rows.float())
    return float(cosines.mean()) > MIN_COSINE_OF_PUBLIC_ROWS


def _measures_beyond_papers(scene: Scene, results: tuple[AttackResult, ...]) -> FindingValues:
    """Returns what attacks read beyond the measures by which papers judge a defence."""
    best, k = strongest(results), int(scene.scheme.get("k", 0))
    neighbours = [cell for cell in results if cell.attack in ("knn", "knn+", "ednn") and cell.state == "done"]
    best_neighbour = max((neighbour.value("tokens top-1") for neighbour in neighbours), default=math.nan)
    guesses = tuple(cell for cell in results if cell.attack == "cluster-conditional" and cell.state == "done")
    guess = strongest(guesses, "tokens top-1")
    reads_more = best is not None and best.value("tokens top-1") > 1.5 * best_neighbour
    guesses_better = guess is not None and k > 0 and guess.value("tokens top-1") >= 2 / k
    if not reads_more and not guesses_better:
        return None
    guessed = guess.value("tokens top-1") if guesses_better and guess is not None else None
    return {"best": best, "weak": best_neighbour if reads_more else None, "guessed": guessed}


def _hidden_bits(results: tuple[AttackResult, ...]) -> FindingValues:
    """Returns the attack that leaves the fewest bits of content hidden, and these bits."""
    cells_with_bits = [
        cell for cell in results if cell.state == "done" and not math.isnan(cell.value("content hidden bits"))
    ]
    if not cells_with_bits:
        return None
    least_hidden = min(cells_with_bits, key=lambda cell: cell.value("content hidden bits"))
    return {"least": least_hidden, "bits": least_hidden.measures["content hidden bits"]}


def _membership(scene: Scene) -> FindingValues:
    """Returns what the trained rows tell about membership, or None if they tell nothing."""
    has_moved = TunedRows.occurring_ids(scene.transcript)
    trained_texts = [tokens.ids for tokens in scene.transcript.all(Tokens) if tokens.purpose == "train"]
    if has_moved is None or not trained_texts:
        return None
    has_occurred = Sequences.of(text for texts in trained_texts for text in texts).counts(len(has_moved)) > 0
    ordinary = scene.truth.counted_rows
    has_moved, has_occurred = has_moved & ordinary, has_occurred & ordinary
    hits = int((has_moved & has_occurred).sum())
    if not hits or hits / has_moved.sum() < 1.2 * has_occurred.sum() / ordinary.sum():
        return None  # all rows moved, as under a tied head: that says nothing
    return {"named": int(has_moved.sum()), "hits": hits, "occurred": int(has_occurred.sum())}


def _repeated_share(scene: Scene) -> FindingValues:
    """Returns the share of texts that repeat an earlier one, if it is 0.01 or more."""
    texts = [text.tobytes() for text in scene.transcript.tokens]
    repeated = 1 - len(set(texts)) / len(texts) if texts else 0.0
    return {"repeated": repeated} if repeated >= 0.01 else None


def mean_cosine_with_originals(scene: Scene) -> float:
    """Returns the mean cosine of the mixed embeddings with their originals, over the ordinary vocabulary.

    1 means unchanged. It is nan if the server has no table or a wider one. The effect on accuracy is known only after
    training both models.
    """
    public = scene.adversaries[0].knowledge.public_model
    assert public is not None
    if not any(weights.model.has_table for weights in scene.transcript.all(Weights)):
        return float("nan")  # the table is in the client's half
    server_table, public_table = scene.transcript.table, public.table
    if server_table.shape[1] != public_table.shape[1]:
        return float("nan")
    if scene.symbols is not None:
        tokens = np.flatnonzero(scene.truth.ordinary)
        rows = scene.symbols[tokens]
    else:
        rows = np.flatnonzero(scene.truth.counted_rows)
        tokens = scene.truth.inverse[rows]
    cosines = torch.nn.functional.cosine_similarity(
        server_table[torch.from_numpy(rows)], public_table[torch.from_numpy(tokens)]
    )
    return float(cosines.mean())
