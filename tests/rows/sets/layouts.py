"""Small folders in the layouts in which the data sets were published. Every text is invented."""

from __future__ import annotations

import json
from pathlib import Path

BOM = "\ufeff"
Expected = tuple[str, str | None, str | None]  # text, pair, label


def put(folder: Path, name: str, text: str, encoding: str = "utf-8") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text.encode(encoding))


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def write_all(root: Path) -> dict[tuple[str, str], list[Expected]]:
    """One folder a data set, and what each split of it holds."""
    found: dict[tuple[str, str], list[Expected]] = {}

    put(
        root / "sst2",
        "train.tsv",
        'sentence\tlabel\na "quoted\ttear \t1\n'.replace('"quoted\t', '"quoted ') + "dull \t0\n",
    )
    put(root / "SST-2", "dev.tsv", "sentence\tlabel\r\nfine \t1\r\n")
    found["sst2", "train"] = [('a "quoted tear ', None, "positive"), ("dull ", None, "negative")]
    found["sst2", "validation"] = [("fine ", None, "positive")]

    put(root / "qnli", "train.tsv", "index\tquestion\tsentence\tlabel\n0\tWho ran?\tBo ran.\tentailment\n")
    put(root / "qnli", "dev.tsv", "index\tquestion\tsentence\tlabel\n0\tWho sat?\tIt rained.\tnot_entailment\n")
    found["qnli", "train"] = [("Who ran?", "Bo ran.", "entailment")]
    found["qnli", "validation"] = [("Who sat?", "It rained.", "not_entailment")]

    put(root / "cola", "train.tsv", "gj04\t1\t\tThe sentence sleeps.\nks08\t0\t*\tThe sleeps sentence.\n")
    put(root / "cola", "in_domain_dev.tsv", "gj04\t1\t\tHe wrote.\n")
    found["cola", "train"] = [
        ("The sentence sleeps.", None, "acceptable"),
        ("The sleeps sentence.", None, "unacceptable"),
    ]
    found["cola", "validation"] = [("He wrote.", None, "acceptable")]

    head = f"{BOM}Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    put(root / "mrpc", "msr_paraphrase_train.txt", head + '1\t10\t11\tHe said " no .\tNo , he said .\n')
    put(root / "mrpc", "dev.tsv", head + "0\t12\t13\tA fell .\tB rose .\n")
    put(root / "mrpc", "msr_paraphrase_test.txt", head + "0\t14\t15\tC fell .\tD rose .")
    found["mrpc", "train"] = [('He said " no .', "No , he said .", "equivalent")]
    found["mrpc", "validation"] = [("A fell .", "B rose .", "not_equivalent")]
    found["mrpc", "test"] = [("C fell .", "D rose .", "not_equivalent")]

    head = "index\tsentence1\tsentence2\tlabel\n"
    put(root / "rte", "train.tsv", head + "0\tBo ran home.\tBo ran.\tentailment\n")
    put(root / "rte", "dev.tsv", head + "0\tBo ran home.\tBo sat.\tnot_entailment\n")
    found["rte", "train"] = [("Bo ran home.", "Bo ran.", "entailment")]
    found["rte", "validation"] = [("Bo ran home.", "Bo sat.", "not_entailment")]

    head = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    put(root / "stsb", "train.tsv", head + "0\tg\tf\t2012\t1\tnone\tnone\tA plane.\tAn aeroplane.\t4.800\n")
    put(root / "stsb", "dev.tsv", head + "0\tg\tf\t2012\t1\tnone\tnone\tA plane.\tA hat.\t0.000\n")
    found["stsb", "train"] = [("A plane.", "An aeroplane.", "4.800")]
    found["stsb", "validation"] = [("A plane.", "A hat.", "0.000")]

    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    broken = "1\t2\t3\tHow far\n2\t3\t4\tHow?\t\t0\n"
    put(root / "qqp", "train.tsv", head + "0\t1\t2\tHow far?\tHow long?\t1\n" + broken)
    put(root / "qqp", "dev.tsv", head + "0\t1\t2\tWhy?\tWho?\t0\n")
    found["qqp", "train"] = [("How far?", "How long?", "duplicate")]
    found["qqp", "validation"] = [("Why?", "Who?", "not_duplicate")]

    head = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
    put(root / "mnli", "train.tsv", head + "0\tg\tBo ran.\tBo moved.\tneutral\tentailment\n1\tg\tA.\tB.\tneutral\t-\n")
    put(root / "mnli", "dev_matched.tsv", head + "0\tg\tBo ran.\tBo sat.\tneutral\tcontradiction\n")
    put(root / "mnli", "dev_mismatched.tsv", head + "0\tg\tBo ran.\tIt rained.\tneutral\tneutral\n")
    found["mnli", "train"] = [("Bo ran.", "Bo moved.", "entailment")]
    found["mnli", "validation"] = [("Bo ran.", "Bo sat.", "contradiction")]
    found["mnli", "validation_mismatched"] = [("Bo ran.", "It rained.", "neutral")]

    put(root / "ag_news", "train.tsv", "Rates rise again\tBusiness\nA probe lands\tSci/Tech\n")
    put(root / "ag_news", "test.csv", '"3","Rates ""rise""","Again, says\na bank."\n"1","Talks","They talk\\so."\n')
    found["ag_news", "train"] = [("Rates rise again", None, "Business"), ("A probe lands", None, "Sci/Tech")]
    found["ag_news", "test"] = [
        ('Rates "rise" Again, says\na bank.', None, "Business"),
        ("Talks They talk\\so.", None, "World"),
    ]

    for file, texts, labels in (
        ("train", "so good\u2028really\n", "2\n"),
        ("val", "meh\n", "1\n"),
        ("test", "no\n", "0\n"),
    ):
        put(root / "tweet_sentiment", f"{file}_text.txt", texts)
        put(root / "tweet_sentiment", f"{file}_labels.txt", labels)
    found["tweet_sentiment", "train"] = [("so good\u2028really", None, "positive")]
    found["tweet_sentiment", "validation"] = [("meh", None, "neutral")]
    found["tweet_sentiment", "test"] = [("no", None, "negative")]

    put(root / "rotten_tomatoes", "rt-polarity.neg", "stale \nclich\xe9 .\nslow\n", "latin-1")
    put(root / "rotten_tomatoes", "rt-polarity.pos", "fresh \n", "latin-1")
    found["rotten_tomatoes", "train"] = [
        ("stale", None, "negative"), ("fresh", None, "positive"), ("clich\xe9 .", None, "negative"),
        ("slow", None, "negative"),
    ]  # fmt: skip

    heads = "Invented Bells Act 1901\n1-Times at which bells are rung\n"
    act = heads + "A bell is rung at noon; a bell is not rung at night. No one sings.\nA bell is rung at noon;"
    put(root / "au_legal", "corpus.jsonl", lines({"citation": "Invented Bells Act 1901", "text": act}))
    found["legal", "train"] = [
        ("A bell is rung at noon;", None, None),
        ("a bell is not rung at night.", None, None),
    ]

    put(root / "enron", "sentences.json", json.dumps(["Call me.", 'A "deal" [is] {done}.'], indent=4))
    found["enron", "train"] = [("Call me.", None, None), ('A "deal" [is] {done}.', None, None)]

    for file in ("wiki.train.tokens", "valid.txt", "wiki.test.tokens"):
        put(root / "wikitext2", file, f"{BOM} \n = Head = \n \n A <unk> of 3 @-@ 4 . \n")
    for split in ("train", "validation", "test"):
        found["wikitext2", split] = [("= Head =", None, None), ("A <unk> of 3 @-@ 4 .", None, None)]

    put(
        root / "ifeval", "input_data.jsonl", lines({"key": 1, "prompt": "Say no commas.", "instruction_id_list": ["x"]})
    )
    found["ifeval", "train"] = [("Say no commas.", None, None)]
    _chats(root)
    return found


def _chats(root: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hello"},
        {"instruction": "Nothing.", "input": "", "output": ""},
    ]
    put(root / "alpaca", "alpaca_data.json", json.dumps(rows, indent=2))
    put(root / "alpaca", "validation.jsonl", lines(rows[1]))
    context = {"instruction": "Who?", "context": "Bo ran.", "response": "Bo", "category": "qa"}
    put(root / "databricks", "databricks-dolly-15k.jsonl", lines(context))
    put(root / "dolly", "validation.jsonl", lines({"instruction": "Who?", "response": "Bo"}))
    put(root / "dialogsum", "train.jsonl", lines({"fname": "t0", "dialogue": "#A#: Hi", "summary": "A greets."}))
    put(root / "dialogsum", "dev.jsonl", lines({"fname": "d0", "dialogue": "#A#: Bye", "summary": "A leaves."}))
    three = {"fname": "e0", "dialogue": "#A#: Go", "summary1": "A sends.", "summary2": "B", "summary3": "C"}
    put(root / "dialogsum", "dialogsum.test.jsonl", lines(three))


CHATS = {
    ("alpaca", "train"): [("Add.\n\n1 and 2", "3"), ("Greet.", "Hello")],
    ("alpaca", "validation"): [("Greet.", "Hello")],
    ("dolly", "train"): [("Who?\n\nBo ran.", "Bo")],
    ("dolly", "validation"): [("Who?", "Bo")],
    ("dialogsum", "train"): [("Summarize the following dialogue.\n\n#A#: Hi", "A greets.")],
    ("dialogsum", "validation"): [("Summarize the following dialogue.\n\n#A#: Bye", "A leaves.")],
    ("dialogsum", "test"): [("Summarize the following dialogue.\n\n#A#: Go", "A sends.")],
}
