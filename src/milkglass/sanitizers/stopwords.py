"""English function words, which CUSTEXT+ and --keep-stopwords let cross.

Pronouns, articles, prepositions, conjunctions, auxiliaries and negations, nothing that names anything. Words that are
names as well ("will", "may", "don") and single letters but "a" and "i" are left out.
"""

from __future__ import annotations

_WORDS = """
i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it
its itself they them their theirs themselves what which who whom whose this that these those am is are was were be
been being have has had having do does did doing would should could can cannot must might shall ought
a an the and but if or because as until while of at by for with about against between into through during before
after above below to from up down in out on off over under again further then once here there when where why how
all any both each few more most other some such no nor not only own same so than too very just also yet
n't 's 're 've 'll 'd 'm
"""
STOPWORDS = frozenset(_WORDS.split())
