"""Replaces the words of a text at random before it leaves, with differential privacy a word at a time.

    table = read_glove(path)                                   # or words_of_model(folder, name)
    sanitizer = SANITIZERS.make("custext", {"epsilon": 2}).text_sanitizer(table)
    prompt = sanitizer.text(prompt, Stream(token_bytes(32)))   # in front of any model

santext.py, custext.py and rnm.py have the mechanisms. Each also draws token ids (`Sanitizer.sanitize`), over a table of
all tokens (`tokens_of_model`). words.py lists what is kept unchanged.
"""
