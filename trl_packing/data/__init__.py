"""Data: rows of any form become documents that fit, and every loss on the way is counted.

    chat_template, messages, row_format, turns, responses    a row → its text, and what is trained
    left_out                                                 what the row says and the text lacks
    spans, tokenize_rows                                     texts → tokens and labels
    bad_rows, stages, stop_tokens, fitting, counts           a data set → documents that fit
    stream, files                                            of a stream, from disk

Belongs here: checks of rows and columns, templates, tokens and labels, overflow policies, counts.
Does not: which documents share a bin (packing).

Read `stages.py` first.
"""
